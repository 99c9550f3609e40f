"""Engines that keep the bits of a quantised checkpoint, in the block formats of GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run_cli
from quantised_folder import GROUP, quantise_folder
from run_engine import engine, generate, logits_of
from safetensors.torch import load_file, save_file
from tiny_hf_folder import save_model

from slipstream.kernels.blocks import BlockMatrix
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import EngineFolder, read_engine_folder
from slipstream.weights.parameters import Quantisation, engine_layout
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.tensor_file import read_header

TOKENS = [[3, 1, 41, 59, 26, 5, 35]]
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def folder_of(tmp_path: Path, family: str = "llama", method: str = "", **options: bool) -> Path:
    sizes = {"n_embd": 128} if family == "gpt2" else SIZES
    folder = save_model(tmp_path / "hf", family, **sizes)
    return quantise_folder(folder, method, **options) if method else folder


def build_both(folder: Path, tmp_path: Path) -> tuple[EngineFolder, EngineFolder]:
    """Return the engine that keeps the bits, and that of the expanded weights in float32."""
    kept = build_engine(folder, tmp_path / "kept", dtype="auto")
    expanded = build_engine(folder, tmp_path / "expanded", dtype="float32")
    return read_engine_folder(kept), read_engine_folder(expanded)


def change(folder: Path, kind: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the tensors of one kind, of all layers."""
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(f".{kind}")]:
        state[name] = edit(state[name])
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def forms(folder: EngineFolder) -> set[str]:
    return {part.form for parts in folder.quantisation.stored.values() for part in parts}


def assert_same(kept: EngineFolder, expanded: EngineFolder, largest: float) -> None:
    """largest: difference of two weights, in scales of a group of 4 bits"""
    found = kept.tensors(dtype=torch.float32)
    expected = expanded.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((found[name].float() - tensor).abs().max())
        if name in kept.quantisation.stored:
            scale = float(tensor.abs().max()) / 7
            assert difference <= largest * scale, name
        else:
            assert difference <= 2**-8 * float(tensor.abs().max()), name  # 16 bits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_symmetric_groups_are_kept_exactly(tmp_path, family, method):
    kept, expanded = build_both(folder_of(tmp_path, family, method, symmetric=True), tmp_path)
    assert kept.quantisation.algorithm == "GGUF"
    assert forms(kept) == {"Q4_0"}
    assert_same(kept, expanded, 0)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_zero_points_become_offsets_of_16_bits(tmp_path, method):
    kept, expanded = build_both(folder_of(tmp_path, "llama", method), tmp_path)
    assert forms(kept) == {"Q4_1"}
    # an offset is at most 15 scales, and has 11 bits
    assert_same(kept, expanded, 15 * 2**-11)
    (ours,) = logits_of(kept.spec, kept.tensors(dtype=torch.float32), torch.float32, TOKENS)
    (expected,) = logits_of(kept.spec, expanded.tensors(), torch.float32, TOKENS)
    assert (ours - expected).abs().max() < 0.01 * float(expected.abs().max())


def test_an_engine_is_as_small_as_the_checkpoint(tmp_path):
    kept, _ = build_both(folder_of(tmp_path, "llama", "gptq"), tmp_path)
    weights = kept.weights()
    saved = 0.0
    for name in kept.quantisation.stored:
        stored = weights[name]
        assert isinstance(stored, BlockMatrix)
        assert stored.nbytes * 8 / np.prod(stored.shape) == 5.0  # bits: 4, and 32 for 32 weights
        saved += stored.nbytes * (16 - 5) / 5
    plain = build_engine(tmp_path / "hf", tmp_path / "16bit", dtype="bfloat16")
    sizes = [(path / "rank0.engine").stat().st_size for path in (kept.path, plain)]
    assert sizes[1] - sizes[0] > 0.95 * saved


@pytest.mark.parametrize(("symmetric", "form", "bits"), [(True, "Q4_0", 4.5), (False, "Q4_1", 5)])
def test_the_experts_of_mixtral_keep_their_bits(tmp_path, symmetric, form, bits):
    folder = folder_of(tmp_path, "mixtral", "gptq", symmetric=symmetric)
    kept, expanded = build_both(folder, tmp_path)
    experts = [name for name in kept.quantisation.stored if ".mlp.experts." in name]
    assert len(experts) == 2 * kept.spec.layers
    on_disk = read_header(kept.path / "rank0.engine").slots
    for name in experts:
        assert {part.form for part in kept.quantisation.stored[name]} == {form}
        parts = [slot for part, slot in on_disk.items() if part.startswith(f"{name}.")]
        weights = np.prod(engine_layout(kept.spec, "bfloat16", Quantisation())[name].shape)
        assert sum(slot.nbytes for slot in parts) * 8 / weights == bits
    assert_same(kept, expanded, 0 if symmetric else 15 * 2**-11)
    prompts = [[5, 9, 30, 2], [7] * 20]
    assert generate(engine(kept.path), prompts, max_tokens=12) == generate(
        engine(expanded.path), prompts, max_tokens=12
    )


def test_the_kept_engine_answers_as_the_expanded_one(tmp_path):
    kept, expanded = build_both(folder_of(tmp_path, "llama", "awq"), tmp_path)
    prompts = [[5, 9, 30, 2], [7] * 20]
    assert generate(engine(kept.path), prompts, max_tokens=12) == generate(
        engine(expanded.path), prompts, max_tokens=12
    )


def test_an_import_shows_the_stored_type(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    folder = folder_of(tmp_path, "llama", "gptq")
    assert run_cli(["import", "-m", "small", "-s", folder]).exit_code == 0
    assert "Q4_1" in run_cli(["show", "small"]).stdout
    assert run_cli(["verify", "small"]).exit_code == 0


def test_columns_in_act_order_are_expanded(tmp_path):
    folder = folder_of(tmp_path, "llama", "gptq")
    change(folder, "g_idx", lambda index: index.flip(0).roll(1))
    kept, expanded = build_both(folder, tmp_path)
    assert kept.quantisation.algorithm is None
    assert_same(kept, expanded, 0)


def test_groups_that_do_not_begin_with_a_block_are_expanded(tmp_path):
    folder = folder_of(tmp_path, "llama", "gptq")
    change(folder, "g_idx", lambda index: index.roll(GROUP // 2))
    kept, _ = build_both(folder, tmp_path)
    assert kept.quantisation.algorithm is None


@pytest.mark.parametrize(("factor", "algorithm"), [(1.0, "GGUF"), (1e-8, None)])
def test_scales_that_16_bits_cannot_hold_are_expanded(tmp_path, factor, algorithm):
    folder = folder_of(tmp_path, "llama", "gptq")
    change(folder, "scales", lambda scales: (scales.float() * factor).bfloat16())
    kept, _ = build_both(folder, tmp_path)
    assert kept.quantisation.algorithm == algorithm


@pytest.mark.parametrize("size", [0, 64])
def test_int8_is_kept_in_blocks(tmp_path, size):
    """size: columns of a group; 0: one scale for each row"""
    folder = folder_of(tmp_path)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj.weight")]:
        weight = state[name].float()
        groups = weight.unflatten(1, (-1, size or weight.shape[1]))
        scales = (groups.abs().amax(2) / 127).bfloat16()
        numbers = (groups / scales.float()[..., None]).round().clamp(-128, 127)
        state[name] = numbers.flatten(1).to(torch.int8)
        state[f"{name}_scale"] = scales
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "strategy": "group" if size else "channel", "group_size": size}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    kept, expanded = build_both(folder, tmp_path)
    assert forms(kept) == {"Q8_0"}
    assert_same(kept, expanded, 0)


def test_the_blocks_of_a_source(tmp_path):
    source = HuggingFaceFolder(folder_of(tmp_path, "llama", "gptq"), "tiny")
    assert source.stored is not None
    assert set(source.stored.forms().values()) == {"Q4_1"}
    rows = source.stored.read_stored("model.layers.0.self_attn.o_proj.weight")
    assert (rows.dtype, rows.shape) == (np.uint8, (128, 128 // 32 * 20))
