from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.weights.build import build_engine
from slipstream.weights.checkpoint import write_checkpoint
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.parameters import checkpoint_shapes
from slipstream.weights.rank_split import RankMapping
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import SourceError, check_source

SaveModel = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gpt2", "gemma3", "phi3", "gptj", "gpt_neox", "falcon", "mixtral"]
)
def test_an_engine_built_from_a_checkpoint_is_the_same(
    save_model: SaveModel, tmp_path: Path, family: str
) -> None:
    folder, _ = save_model(family, eos_token_id=[3, 4])
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = write_checkpoint(
        open_source(str(folder)), tmp_path / "checkpoint", dtype="float32"
    )
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.safetensors",
        "tokenizer.json",
    ]
    direct = read_engine_config(build_engine(folder, tmp_path / "direct", weight_only="int8"))
    classic = read_engine_config(build_engine(checkpoint, tmp_path / "classic", weight_only="int8"))
    assert classic.content_hash == direct.content_hash
    assert classic.generation.end_ids == (3, 4)


@pytest.mark.parametrize("family", ["llama", "gptj", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "mapping", [RankMapping(2, 1), RankMapping(1, 2), RankMapping(2, 2)], ids=str
)
def test_an_engine_built_from_several_ranks_is_the_same(
    save_model: SaveModel, tmp_path: Path, family: str, mapping: RankMapping
) -> None:
    folder, _ = save_model(family)
    checkpoint = write_checkpoint(
        open_source(str(folder)), tmp_path / "checkpoint", dtype="float32", mapping=mapping
    )
    direct = read_engine_config(build_engine(folder, tmp_path / "direct", dtype="float32"))
    divided = read_engine_config(build_engine(checkpoint, tmp_path / "divided", dtype="float32"))
    assert divided.content_hash == direct.content_hash


def test_each_rank_holds_its_share_of_every_expert(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("mixtral")
    mapping = RankMapping(tp_size=2)
    checkpoint = write_checkpoint(
        open_source(str(folder)), tmp_path / "checkpoint", dtype="float32", mapping=mapping
    )
    stored = load_file(folder / "model.safetensors")
    held = load_file(checkpoint / "rank1.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.3."
    gate_up = held["transformer.layers.1.mlp.experts.gate_up.weight"].view(5, 2, 48, 64)
    assert torch.equal(gate_up[3, 0], stored[f"{expert}w1.weight"][48:])
    assert torch.equal(gate_up[3, 1], stored[f"{expert}w3.weight"][48:])
    assert torch.equal(
        held["transformer.layers.1.mlp.experts.proj.weight"].view(5, 64, 48)[3],
        stored[f"{expert}w2.weight"][:, 48:],
    )


def test_names_shapes_and_config_of_a_checkpoint(save_model: SaveModel, tmp_path: Path) -> None:
    folder, model = save_model("llama")
    source = open_source(str(folder))
    checkpoint = write_checkpoint(source, tmp_path / "checkpoint", dtype="float16")
    tensors = load_file(checkpoint / "rank0.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == checkpoint_shapes(
        source.spec
    )
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    state = model.state_dict()
    layer = "transformer.layers.1."
    assert torch.equal(
        tensors[layer + "mlp.fc.weight"], state["model.layers.1.mlp.gate_proj.weight"].half()
    )
    assert torch.equal(
        tensors[layer + "mlp.gate.weight"], state["model.layers.1.mlp.up_proj.weight"].half()
    )
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architecture"] == "LlamaForCausalLM"
    assert (config["dtype"], config["num_hidden_layers"], config["rotary_base"]) == (
        "float16",
        2,
        10000.0,
    )


def test_missing_and_extra_tensors_of_a_checkpoint_are_reported(
    save_model: SaveModel, tmp_path: Path
) -> None:
    folder, _ = save_model("llama")
    checkpoint = write_checkpoint(open_source(str(folder)), tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "rank0.safetensors")
    tensors["stranger"] = tensors.pop("transformer.ln_f.weight")
    save_file(tensors, checkpoint / "rank0.safetensors")
    with pytest.raises(
        SourceError, match=r"missing transformer\.ln_f\.weight; unexpected stranger"
    ):
        check_source(open_source(str(checkpoint)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("slipstream"), "not a checkpoint that this release"),
        (lambda config: config.pop("hidden_size"), "lacks hidden_size"),
        (lambda config: config.pop("generation"), "damaged: 'generation'"),
    ],
)
def test_a_damaged_checkpoint_or_one_of_another_format_is_refused(
    save_model: SaveModel, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder, _ = save_model("llama")
    checkpoint = write_checkpoint(open_source(str(folder)), tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=message):
        open_source(str(checkpoint))


def test_an_unknown_dtype_is_refused(save_model: SaveModel, tmp_path: Path) -> None:
    folder, _ = save_model("llama")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        write_checkpoint(open_source(str(folder)), tmp_path / "checkpoint", dtype="int8")


@pytest.mark.parametrize(
    ("quantisation", "text"),
    [
        (
            {"quant_algo": "W4A16_AWQ", "group_size": 128},
            "TensorRT-LLM, quantised as W4A16_AWQ, wh",
        ),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "quantised as W8A8_SQ_PER_CHANNEL"),
    ],
)
def test_a_checkpoint_of_upstream_is_refused_with_what_to_give(tmp_path, quantisation, text):
    config = {"architecture": "LlamaForCausalLM", "quantization": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"transformer.ln_f.weight": torch.ones(2)}, tmp_path / "rank0.safetensors")
    with pytest.raises(SourceError, match=f"{text}.*give the Hugging Face folder"):
        open_source(str(tmp_path))
