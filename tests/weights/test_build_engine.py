from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantised import dequantise
from tiny_models import expected_tensors

from slipstream.weights import stream
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import BuildLimits, read_engine_config
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.parameters import Quantisation
from slipstream.weights.quantise import quantise_rows
from slipstream.weights.sources import source as source_module
from slipstream.weights.sources.source import SourceError

SaveModel = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_cast_to_the_requested_type(
    save_model: SaveModel, tmp_path: Path, dtype: str
) -> None:
    folder, model = save_model("llama")
    tensors = read_engine_folder(build_engine(folder, tmp_path / "engine", dtype=dtype)).tensors()
    for name, expected in expected_tensors(model).items():
        assert torch.equal(tensors[name], expected.to(getattr(torch, dtype))), name


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "bfloat16")],
)
def test_dtype_auto_keeps_a_16_bit_type(
    save_model: SaveModel, tmp_path: Path, stored: Any, expected: str
) -> None:
    folder, _ = save_model("llama", dtype=stored)
    assert (
        read_engine_config(build_engine(folder, tmp_path / "engine", dtype="auto")).dtype
        == expected
    )


def test_limits_default_to_the_models_length(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("gpt2")
    assert read_engine_config(build_engine(folder, tmp_path / "engine")).build == BuildLimits(
        128, 128, 64, 8192, 1
    )


def test_weights_read_in_small_blocks_are_the_same(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = save_model("gpt2")
    monkeypatch.setattr(source_module, "BLOCK_BYTES", 1000)
    tensors = read_engine_folder(
        build_engine(folder, tmp_path / "engine", dtype="float32")
    ).tensors()
    for name, expected in expected_tensors(model).items():
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize(
    ("weight_only", "algorithm", "group", "bound"),
    [("int8", "W8A16", 0, 0.008), ("int4", "W4A16", 32, 0.1)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_only_engines_are_close_to_the_model(
    save_model: SaveModel,
    tmp_path: Path,
    weight_only: str,
    algorithm: str,
    group: int,
    bound: float,
    tied: bool,
) -> None:
    folder, model = save_model("qwen2", tie_word_embeddings=tied)
    engine = read_engine_folder(build_engine(folder, tmp_path / "engine", weight_only=weight_only))
    assert engine.quantisation == Quantisation(algorithm, group)
    tensors = engine.tensors()
    expected = expected_tensors(model)
    expected["lm_head.weight"] = expected.get(
        "lm_head.weight", expected["transformer.vocab_embedding.weight"]
    )
    quantised = [
        name
        for name in expected
        if name.endswith(
            ("qkv.weight", "dense.weight", "gate_up.weight", "proj.weight", "lm_head.weight")
        )
    ]
    assert len(quantised) == 2 * 4 + 1
    for name, weight in expected.items():
        if name not in quantised:
            assert torch.equal(tensors[name], weight.bfloat16()), name
            continue
        stored, scales = tensors[name], tensors[name.replace(".weight", ".scales")]
        rows, columns = weight.shape
        if weight_only == "int8":
            assert (stored.dtype, stored.shape, scales.shape) == (
                torch.int8,
                (rows, columns),
                (rows,),
            )
        else:
            assert (stored.dtype, stored.shape, scales.shape) == (
                torch.uint8,
                (rows, columns // 2),
                (rows, columns // group, 2),
            )
        assert scales.dtype == torch.float32
        assert (dequantise(stored, scales) - weight).norm() < bound * weight.norm(), name


def test_int4_stores_the_low_nibble_first_and_level_8_is_the_offset() -> None:
    row = torch.tensor([[-8.0, 7.0, 0.0, 3.0] * 8]) + 2.0
    stored, scales = quantise_rows(row, 4, 32)
    assert scales.tolist() == [[[1.0, 2.0]]]
    assert stored[0, :2].tolist() == [0 | 15 << 4, 8 | 11 << 4]
    assert torch.equal(dequantise(stored, scales), row)


def test_scales_are_values_of_bfloat16() -> None:
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    for bits, bound in ((8, 0.008), (4, 0.09)):
        stored, scales = quantise_rows(rows, bits, 32)
        assert torch.equal(scales.bfloat16().float(), scales)
        assert (dequantise(stored, scales) - rows).norm() < bound * rows.norm()


def test_constant_groups_and_rows_of_zeros_are_exact() -> None:
    for bits in (8, 4):
        stored, scales = quantise_rows(torch.zeros(2, 64), bits, 32)
        assert torch.equal(dequantise(stored, scales), torch.zeros(2, 64))
    stored, scales = quantise_rows(torch.full((2, 64), 0.5), 4, 32)
    assert torch.equal(dequantise(stored, scales), torch.full((2, 64), 0.5))


def test_int4_refuses_sizes_that_are_not_whole_groups(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama", intermediate_size=90)
    with pytest.raises(ValueError, match=r"multiples of 32.*64, 90 inputs: use int8"):
        build_engine(folder, tmp_path / "engine", weight_only="int4")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of auto, float32"),
        ({"weight_only": "int2"}, "not one of int8, int4, fp8"),
    ],
)
def test_unknown_types_are_refused(
    save_model: SaveModel, tmp_path: Path, options: Any, message: str
) -> None:
    folder, _ = save_model("llama")
    with pytest.raises(ValueError, match=message):
        build_engine(folder, tmp_path / "engine", **options)


def test_only_a_different_build_writes_again(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    engine = build_engine(folder, tmp_path / "engine")
    inode = (engine / "rank0.engine").stat().st_ino
    calls: list[Any] = []
    build_engine(folder, engine, progress=lambda *step: calls.append(step))
    assert ((engine / "rank0.engine").stat().st_ino, calls) == (inode, [])
    build_engine(folder, engine, dtype="float16")
    assert read_engine_folder(engine).dtype == "float16"
    assert (engine / "rank0.engine").stat().st_ino != inode


def test_a_changed_source_or_a_damaged_engine_is_built_again(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    engine = build_engine(folder, tmp_path / "engine")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    build_engine(folder, engine)
    assert (engine / "tokenizer_config.json").read_text() == '{"a": 1}'
    (engine / "rank0.engine").write_bytes(b"damaged")
    assert read_engine_folder(build_engine(folder, engine)).spec.layers == 2
    (engine / "tokenizer_config.json").unlink()
    build_engine(folder, engine)
    assert (engine / "tokenizer_config.json").exists()
    (folder / "tokenizer_config.json").unlink()
    build_engine(folder, engine)
    assert not (engine / "tokenizer_config.json").exists()


def test_a_finished_build_and_a_refusal_do_not_import_torch(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    engine = build_engine(folder, tmp_path / "engine")
    code = (
        "import sys, json, pathlib\n"
        "from slipstream.weights.build import build_engine\n"
        "folder, engine = map(pathlib.Path, sys.argv[1:])\n"
        "build_engine(folder, engine)\n"
        "config = json.loads((folder / 'config.json').read_text())\n"
        "(folder / 'config.json').write_text(json.dumps({**config, 'architectures': ['OtherForCausalLM']}))\n"
        "try:\n"
        "    build_engine(folder, engine)\n"
        "except ValueError as error:\n"
        "    assert 'OtherForCausalLM' in str(error)\n"
        "else:\n"
        "    raise SystemExit('was not refused')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(engine)], check=True)


def test_content_hash_depends_on_content_only(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    first = read_engine_config(build_engine(folder, tmp_path / "a")).content_hash
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert read_engine_config(build_engine(copy, tmp_path / "b")).content_hash == first
    assert (
        read_engine_config(build_engine(folder, tmp_path / "c", dtype="float16")).content_hash
        != first
    )


def test_progress_increases_to_the_total(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    steps: list[tuple[str, int, int]] = []
    build_engine(folder, tmp_path / "engine", progress=lambda *step: steps.append(step))
    done = [step[1] for step in steps]
    assert done == sorted(done)
    assert {step[0] for step in steps} == {"weights"}
    assert {step[2] for step in steps} == {done[-1]}


KILLED_BUILD = """
import os, signal, sys
from pathlib import Path
from slipstream.weights.build import build_engine
def die_halfway(phase, done, total):
    if done * 2 > total:
        os.kill(os.getpid(), signal.SIGKILL)
build_engine(sys.argv[1], Path(sys.argv[2]), progress=die_halfway)
"""


@pytest.mark.parametrize("exists", [False, True])
def test_a_killed_build_leaves_no_engine_and_the_next_one_cleans_up(
    save_model: SaveModel, tmp_path: Path, exists: bool
) -> None:
    folder, _ = save_model("llama")
    place = tmp_path / "engines"
    engine = place / "model"
    (engine if exists else place).mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", KILLED_BUILD, str(folder), str(engine)], check=False
    )
    assert result.returncode == -signal.SIGKILL
    staged = engine if exists else place
    assert [path.name.startswith(".slipstream-writing-") for path in staged.iterdir()] == [True]
    assert not (engine / "config.json").exists()
    build_engine(folder, engine)
    assert [path.name for path in place.iterdir()] == ["model"]
    assert sorted(path.name for path in engine.iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.engine",
    ]
    assert read_engine_folder(engine).spec.layers == 2


def test_a_failed_build_leaves_nothing(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")

    def fail(phase: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    place = tmp_path / "engines"
    with pytest.raises(KeyboardInterrupt):
        build_engine(folder, place / "model", progress=fail)
    assert list(place.iterdir()) == []


def test_a_build_does_not_remove_the_files_of_a_running_build(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    place = tmp_path / "engines"

    def build_beside(phase: str, done: int, total: int) -> None:
        if done == total:
            build_engine(folder, place / "other")

    build_engine(folder, place / "model", progress=build_beside)
    assert (
        read_engine_folder(place / "model").content_hash
        == read_engine_folder(place / "other").content_hash
    )


def test_other_files_in_the_output_folder_are_kept(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "notes.txt").write_text("mine")
    build_engine(folder, engine)
    assert (engine / "notes.txt").read_text() == "mine"
    assert read_engine_folder(engine).spec.layers == 2
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        build_engine(folder, blocked)
    assert blocked.read_text() == "mine"


def test_a_full_disk_is_reported_before_anything_is_written(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_model("llama")
    monkeypatch.setattr(
        stream.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=10**6)
    )
    with pytest.raises(SourceError, match=r"needs 0\.1 GB of disk, 0\.0 GB are free"):
        build_engine(folder, tmp_path / "new" / "engine")
    assert not (tmp_path / "new").exists()


def test_config_lists_the_files_with_their_checksums(save_model: SaveModel, tmp_path: Path) -> None:
    import hashlib

    folder, _ = save_model("llama")
    (folder / "tokenizer.json").write_text("{}")
    engine = build_engine(folder, tmp_path / "engine")
    listed = json.loads((engine / "config.json").read_text())["slipstream"]["files"]
    assert listed == {
        name: hashlib.sha256((engine / name).read_bytes()).hexdigest()
        for name in ("tokenizer.json", "generation_config.json", "rank0.engine")
    }
    assert os.access(engine, os.R_OK | os.X_OK)
