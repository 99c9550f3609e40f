from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import (
    BuildLimits,
    EngineFolderError,
    GenerationDefaults,
    read_engine_config,
)
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.load import start_engine
from slipstream.weights.parameters import Quantisation
from slipstream.weights.sources.open_source import open_source


@pytest.fixture
def engine(save_model: Callable[..., Any], tmp_path: Path) -> Path:
    folder, _ = save_model("llama", eos_token_id=[3, 4], bos_token_id=1)
    limits = BuildLimits(
        max_input_len=50, max_seq_len=100, max_batch_size=3, max_num_tokens=70, max_beam_width=2
    )
    return build_engine(folder, tmp_path / "engine", limits=limits)


def edit_config(engine: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((engine / "config.json").read_text())
    change(config)
    (engine / "config.json").write_text(json.dumps(config))


def test_the_config_is_read_as_it_was_built(engine: Path, tmp_path: Path) -> None:
    folder = read_engine_folder(engine)
    assert folder.spec == open_source(str(tmp_path / "hf-llama")).spec
    assert (folder.path, folder.dtype, folder.quantisation) == (engine, "bfloat16", Quantisation())
    assert folder.build == BuildLimits(50, 100, 3, 70, 2)
    assert folder.generation == GenerationDefaults((3, 4), 1, None)
    assert vars(read_engine_config(engine)) == vars(folder)
    document = json.loads((engine / "config.json").read_text())
    assert document["pretrained_config"]["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert document["pretrained_config"]["quantization"] == {
        "quant_algo": None,
        "group_size": 0,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }
    assert document["slipstream"]["format"] == 1
    assert document["slipstream"]["source"] == str(tmp_path / "hf-llama")


@pytest.mark.parametrize(("wanted", "got"), [(None, 70), (20, 20), (90, 90)])
def test_the_build_limits_step_tokens_unless_the_settings_do(
    engine: Path, wanted: int | None, got: int
) -> None:
    settings = EngineSettings(
        device="cpu", dtype="float32", max_rows=2, cache_tokens=128, step_tokens=wanted
    )
    assert start_engine(engine, settings).scheduler.step_tokens == got


@pytest.mark.parametrize(("wanted", "got"), [(None, 3), (2, 2), (9, 9)])
def test_the_build_limits_rows_unless_the_settings_do(
    engine: Path, wanted: int | None, got: int
) -> None:
    settings = EngineSettings(device="cpu", dtype="float32", max_rows=wanted, cache_tokens=128)
    assert start_engine(engine, settings).info.max_rows == got


def test_a_default_of_the_build_limits_nothing(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    limits = BuildLimits(50, 100)
    default = read_engine_config(build_engine(folder, tmp_path / "default", limits=limits))
    assert default.build.max_batch_size == 64  # what tools read that fill config.pbtxt
    assert default.build.chosen("max_batch_size") is None
    assert default.build.chosen("max_num_tokens") is None
    given = BuildLimits(50, 100, 64, given=("max_batch_size",))
    chosen = read_engine_config(build_engine(folder, tmp_path / "chosen", limits=given))
    assert chosen.build.chosen("max_batch_size") == 64
    assert chosen.build.chosen("max_num_tokens") is None
    assert chosen.inputs_hash != default.inputs_hash  # it is built again


@pytest.mark.parametrize(("recorded", "chosen"), [(64, None), (512, 512)])
def test_folders_of_earlier_releases_do_not_say_what_was_given(
    engine: Path, recorded: int, chosen: int | None
) -> None:
    def as_before(config: dict[str, Any]) -> None:
        del config["slipstream"]["given_limits"]
        config["build_config"]["max_batch_size"] = recorded

    edit_config(engine, as_before)
    assert read_engine_config(engine).build.chosen("max_batch_size") == chosen


def test_reading_the_config_does_not_import_torch(engine: Path) -> None:
    code = (
        "import sys; from slipstream.weights.engine_config import read_engine_config; "
        "read_engine_config(sys.argv[1]); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(engine)], check=True)


def test_a_gpu_child_folder_is_found_and_a_missing_one_ignored(
    engine: Path, tmp_path: Path
) -> None:
    assert read_engine_config(engine / "1-gpu").path == engine
    parent = tmp_path / "engines"
    parent.mkdir()
    engine.rename(parent / "1-gpu")
    assert read_engine_config(parent).path == parent / "1-gpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config["slipstream"].update(format=3),
            "engine format 3, this release reads 1 and 2; upgrade",
        ),
        (lambda config: config.pop("slipstream"), "compiled by TensorRT-LLM"),
        (lambda config: config.pop("generation"), "damaged: lacks 'generation'"),
        (
            lambda config: config["pretrained_config"].pop("hidden_size"),
            "model config lacks hidden_size",
        ),
        (lambda config: config["pretrained_config"].update(dtype="float8"), "dtype 'float8'"),
        (
            lambda config: config["pretrained_config"]["quantization"].update(quant_algo="NVFP4"),
            "quantisation 'NVFP4'",
        ),
        (lambda config: config["build_config"].update(max_seq_len="many"), "damaged.*many"),
        (
            lambda config: config["pretrained_config"].update(num_key_value_heads=3),
            "multiple of kv_heads",
        ),
    ],
)
def test_an_unusable_config_is_refused_in_one_line(engine: Path, change: Any, message: str) -> None:
    edit_config(engine, change)
    with pytest.raises(EngineFolderError, match=message) as refusal:
        read_engine_folder(engine)
    assert str(engine / "config.json") in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"architectures": ["X"]}', "Hugging Face model"),
        ('{"architecture": "X"}', "a checkpoint"),
        ("{}", "another program's"),
    ],
)
def test_a_config_of_another_program_is_named_in_the_error(
    engine: Path, content: str, message: str
) -> None:
    (engine / "config.json").write_text(content)
    with pytest.raises(EngineFolderError, match=message):
        read_engine_config(engine)


def test_a_missing_folder_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineFolderError, match=r"no config\.json in it"):
        read_engine_config(tmp_path)
    with pytest.raises(EngineFolderError, match="no such folder"):
        read_engine_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "cut short in its header"),
        (lambda path: path.write_bytes(b"ftrt" + bytes(5000)), "not a safetensors file"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_damaged_weights_are_refused_in_one_line(
    engine: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(engine / "rank0.engine")
    with pytest.raises(EngineFolderError, match=message) as refusal:
        read_engine_folder(engine)
    assert "rank0.engine" in str(refusal.value)
    assert "import the model again" in str(refusal.value)


def test_weights_of_another_model_are_refused_with_tensor_names(engine: Path) -> None:
    path = engine / "rank0.engine"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    del tensors["transformer.ln_f.weight"]
    tensors["stranger"] = torch.zeros(1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, path)
    with pytest.raises(
        EngineFolderError,
        match=r"lacks transformer\.ln_f\.weight; has unknown stranger; "
        r"has another shape or type for lm_head\.weight",
    ):
        read_engine_folder(engine)


def test_tensors_are_mapped_and_aligned(engine: Path) -> None:
    tensors = read_engine_folder(engine).tensors()
    assert tensors["transformer.vocab_embedding.weight"].data_ptr() % 64 == 0
    with pytest.raises(EngineFolderError, match=r"rank1\.engine: missing"):
        read_engine_folder(engine).tensors(1)
