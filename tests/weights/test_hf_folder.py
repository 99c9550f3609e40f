from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import expected_tensors

from slipstream.model.families.family import UnsupportedModel
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import SourceError, check_source

SaveModel = Callable[..., tuple[Path, Any]]


def assert_engine_equals(source: Path, model: Any, output: Path) -> None:
    found = read_engine_folder(build_engine(source, output, dtype="float32")).tensors()
    expected = expected_tensors(model)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("gpt2", {}),
        ("gpt2", {"n_inner": 80, "tie_word_embeddings": False}),
    ],
)
def test_engine_holds_the_models_tensors(
    save_model: SaveModel, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder, model = save_model(family, **options)
    assert_engine_equals(folder, model, tmp_path / "engine")


def test_a_model_in_shards_is_read(save_model: SaveModel, tmp_path: Path) -> None:
    folder, model = save_model("llama", shard="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_engine_equals(folder, model, tmp_path / "engine")


def test_copies_in_other_formats_are_ignored(save_model: SaveModel, tmp_path: Path) -> None:
    folder, model = save_model("llama")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert_engine_equals(folder, model, tmp_path / "engine")


def test_gpt2_names_without_prefix_and_with_mask_buffers(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, model = save_model("gpt2")
    path = folder / "model.safetensors"
    stored = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    stored["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, path)
    assert_engine_equals(folder, model, tmp_path / "engine")


def test_rotary_buffers_and_a_copy_of_the_tied_head_are_ignored(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, model = save_model("llama", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, path)
    assert_engine_equals(folder, model, tmp_path / "engine")


def test_pickled_weights_are_refused_with_a_remedy(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        open_source(str(folder))


def test_missing_and_unexpected_tensors_are_reported(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    del stored["model.layers.0.mlp.up_proj.weight"]
    save_file(stored, path)
    with pytest.raises(
        SourceError,
        match=r"missing model\.layers\.N\.mlp\.up_proj\.weight; "
        r"unexpected model\.layers\.N\.self_attn\.q_proj\.bias",
    ):
        check_source(open_source(str(folder)))


def test_a_shape_that_contradicts_the_config_is_reported(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(
        SourceError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\].*\[100, 64\]"
    ):
        check_source(open_source(str(folder)))


def test_a_missing_shard_is_reported(save_model: SaveModel) -> None:
    folder, _ = save_model("llama", shard="40KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(SourceError, match=f"1 of .* shards are missing.*{gone.name}"):
        open_source(str(folder))


def test_an_index_with_files_outside_the_folder_is_refused(save_model: SaveModel) -> None:
    folder, _ = save_model("llama", shard="40KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(SourceError, match="outside the folder"):
        open_source(str(folder))


def test_a_shard_that_is_cut_short_is_refused_on_opening(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"model\.safetensors.*cut short.*download"):
        open_source(str(folder))


def test_a_git_lfs_pointer_is_refused_with_a_remedy(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    )
    with pytest.raises(SourceError, match="git lfs pull"):
        open_source(str(folder))


def test_unsupported_architecture_names_its_tensors(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["RwkvForCausalLM"]})
    )
    save_file({"model.layers.0.dense.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModel,
        match=r"RwkvForCausalLM.*LlamaForCausalLM.*model\.layers\.N\.dense\.weight",
    ):
        open_source(str(folder))


def test_quantised_weights_are_refused(save_model: SaveModel) -> None:
    folder, _ = save_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(
        SourceError, match=r"quantised \(hqq\), which is not read.*--use_weight_only"
    ):
        open_source(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"rope_scaling": [1]},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "small"},
        {"architectures": 5},
    ],
)
def test_a_config_with_invalid_values_is_refused_in_one_line(
    save_model: SaveModel, change: dict[str, Any]
) -> None:
    folder, _ = save_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((SourceError, UnsupportedModel)) as refusal:
        check_source(open_source(str(folder)))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "family", ["gemma3", "phi3", "opt", "gptj", "gpt_neox", "falcon", "mixtral", "qwen2_moe"]
)
def test_any_value_of_a_config_is_read_or_refused_in_one_line(
    save_model: SaveModel, family: str
) -> None:
    folder, _ = save_model(family)
    config = json.loads((folder / "config.json").read_text())
    refusals = []
    for key in config:
        for value in (10**12, {"a": {}}, -1):
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                check_source(open_source(str(folder)))
            except (SourceError, UnsupportedModel) as refusal:
                refusals.append(str(refusal))
    assert len(refusals) > 20
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.parametrize(
    ("config_end", "generation_end", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [5, 6, 5], (5, 6)),
        (None, None, ()),
        (2, 7, (7,)),
    ],
)
def test_end_ids_are_read(
    save_model: SaveModel, config_end: Any, generation_end: Any, expected: tuple[int, ...]
) -> None:
    folder, _ = save_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "eos_token_id": config_end, "bos_token_id": 1, "pad_token_id": -1})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_end}))
    generation = open_source(str(folder)).generation
    assert (generation.end_ids, generation.bos_id, generation.pad_id) == (expected, 1, None)


def test_only_tokenizer_files_are_copied_to_the_engine(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    engine = build_engine(folder, tmp_path / "engine")
    assert sorted(path.name for path in engine.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "rank0.engine",
        "tokenizer.json",
    ]


def test_source_prefixes_and_unknown_sources(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    assert open_source(f"local:{folder}").spec.layers == 2
    with pytest.raises(SourceError, match="ngc:"):
        open_source("ngc:llama")
    with pytest.raises(SourceError, match="no such folder or file"):
        open_source(f"local:{tmp_path / 'absent'}")
    with pytest.raises(SourceError, match="not a known model; known: smollm2-135m, llama-2-7b"):
        open_source("llama-9")
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(SourceError, match=r"config\.json is missing"):
        open_source(str(folder))


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config\.json is missing\. A model folder holds"):
        open_source(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SourceError, match=rf"give {tmp_path}/model\.gguf"):
        open_source(str(tmp_path))
