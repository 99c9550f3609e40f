"""Engines that keep the bits of a checkpoint in FP8, with the scales of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dequantised import dequantise
from run_engine import engine, generate, logits_of
from safetensors.torch import load_file, save_file
from tiny_hf_folder import save_model
from tiny_models import folder_tensors

from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import EngineFolder, read_engine_folder

TOKENS = [[3, 1, 41, 59, 26, 5, 35]]
LAYERS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
# format: (settings, kind of the scales' tensor, the weights that share a scale)
FORMATS = {
    "channel": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "one": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
        },
        "weight_scale",
        "row",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "weight_scale", "row"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", "tensor"),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "weight_scale_inv",
        "block",
    ),
}


def fp8_folder(folder: Path, name: str, skipped: str = "", family: str = "llama") -> Path:
    """Write a model in FP8, without the layers whose names contain `skipped`."""
    save_model(folder, family, hidden_size=128, intermediate_size=256)
    settings, kind, shared = FORMATS[name]
    state = load_file(folder / "model.safetensors")
    for layer in [
        one for one in state if one.endswith(LAYERS) and not (skipped and skipped in one)
    ]:
        weight = state[layer].float()
        tiles = weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        largest = {
            "row": weight.abs().amax(1, keepdim=True),
            "tensor": weight.abs().max()[None],
            "block": tiles.abs().amax((1, 3)),
        }[shared]
        scales = largest / 448
        spread = scales
        if shared == "block":
            spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
        state[layer] = (weight / spread).to(torch.float8_e4m3fn)
        state[layer.removesuffix("weight") + kind] = scales
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def built(folder: Path, output: Path, **options: str) -> tuple[EngineFolder, set[str]]:
    phases: set[str] = set()
    found = build_engine(
        folder,
        output,
        progress=lambda phase, done, total: phases.add(phase),
        **{"dtype": "auto", **options},
    )
    return read_engine_folder(found), phases


@pytest.mark.parametrize("name", ["channel", "fbgemm", "modelopt"])
def test_weights_and_scales_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder = fp8_folder(tmp_path / "hf", name)
    kept, phases = built(folder, tmp_path / "kept")
    assert phases == {"weights"}
    assert kept.quantisation.algorithm == "FP8"
    assert kept.quantisation.excluded == ()
    spec, expected = folder_tensors(folder)
    state = load_file(folder / "model.safetensors")
    engine_tensors = kept.tensors()
    qkv = "transformer.layers.1.attention.qkv"
    parts = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    stored = torch.cat([state[part].view(torch.uint8) for part in parts])
    assert torch.equal(engine_tensors[f"{qkv}.weight"].view(torch.uint8), stored)
    scales = [
        state[f"{part}_scale"].expand(len(state[part]), 1)[:, 0]
        if name != "modelopt"
        else state[f"{part}_scale"].expand(len(state[part]))
        for part in parts
    ]
    assert torch.equal(engine_tensors[f"{qkv}.scales"], torch.cat(scales))
    if name == "modelopt":
        assert len(engine_tensors[f"{qkv}.scales"].unique()) == 3  # of queries, keys, values
    linears = [one for one in engine_tensors if one.endswith(".scales")]
    assert len(linears) == 4 * spec.layers
    assert_linears(engine_tensors, expected)
    (ours,) = logits_of(spec, engine_tensors, torch.float32, TOKENS)
    (meant,) = logits_of(spec, expected, torch.float32, TOKENS)
    # the embedding and the output layer are rounded to 16 bits
    assert (ours - meant).abs().max() < 0.01 * float(meant.abs().max())


def assert_linears(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The weights with scales are exactly those of the checkpoint."""
    for name in [one for one in found if one.endswith(".scales")]:
        weight = name.replace(".scales", ".weight")
        assert torch.equal(dequantise(found[weight], found[name]), expected[weight].float())


def test_the_kept_engine_is_half_as_large_and_answers_as_the_expanded_one(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf", "channel")
    kept, _ = built(folder, tmp_path / "kept")
    expanded, phases = built(folder, tmp_path / "expanded", dtype="bfloat16")
    assert phases == {"weights, expanded from compressed-tensors"}
    assert expanded.quantisation.algorithm is None
    weights = sum(
        slot.numel()
        for name, slot in kept.tensors().items()
        if f"{name[:-6]}scales" in kept.tensors()
    )
    sizes = [(one.path / "rank0.engine").stat().st_size for one in (kept, expanded)]
    assert 0.95 * weights < sizes[1] - sizes[0] < weights
    prompts = [[5, 9, 30, 2], [7] * 20]
    assert generate(engine(kept.path), prompts, max_tokens=12) == generate(
        engine(expanded.path), prompts, max_tokens=12
    )


def test_layers_that_are_not_in_fp8_stay_in_16_bits(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf", "modelopt", skipped="layers.0.self_attn.k_proj")
    kept, _ = built(folder, tmp_path / "kept")
    assert kept.quantisation.algorithm == "FP8"
    assert kept.quantisation.excluded == ("transformer.layers.0.attention.qkv",)
    spec, expected = folder_tensors(folder)
    (ours,) = logits_of(spec, kept.tensors(), torch.float32, TOKENS)
    (meant,) = logits_of(spec, expected, torch.float32, TOKENS)
    assert (ours - meant).abs().max() < 0.02 * float(meant.abs().max())


def test_scales_of_blocks_are_expanded(tmp_path: Path) -> None:
    kept, phases = built(fp8_folder(tmp_path / "hf", "fp8"), tmp_path / "kept")
    assert kept.quantisation.algorithm is None
    assert phases == {"weights, expanded from fp8"}


def test_experts_keep_their_bits(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf", "channel", family="mixtral")
    kept, _ = built(folder, tmp_path / "kept")
    assert kept.quantisation.excluded == ()
    tensors = kept.tensors()
    experts = [one for one in tensors if ".experts." in one and one.endswith(".weight")]
    assert len(experts) == 2 * kept.spec.layers
    assert {tensors[one].dtype for one in experts} == {torch.float8_e4m3fn}
    expanded, _ = built(folder, tmp_path / "expanded", dtype="float32")
    assert_linears(tensors, expanded.tensors())
    (ours,) = logits_of(kept.spec, tensors, torch.float32, TOKENS)
    (meant,) = logits_of(kept.spec, expanded.tensors(), torch.float32, TOKENS)
    assert (ours - meant).abs().max() < 0.01 * float(meant.abs().max())


def test_fp8_that_is_asked_for_does_not_round_again(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf", "channel")
    asked, _ = built(folder, tmp_path / "asked", weight_only="fp8", dtype="bfloat16")
    kept, _ = built(folder, tmp_path / "kept")
    found = kept.tensors()
    both = [one for one in asked.tensors() if one.endswith(".scales")]
    assert both
    for name in both:
        weight = name.replace(".scales", ".weight")
        assert torch.equal(asked.tensors()[name], found[name])
        bits = [one[weight].view(torch.uint8) for one in (asked.tensors(), found)]
        assert torch.equal(*bits)
