"""Quantised checkpoints, written here by the published layouts: an engine has the matrices that the
quantised values stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_engine import logits_of
from safetensors.torch import load_file, save_file
from tiny_models import config_of, folder_tensors, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.source import SourceError

GROUP = 16
TOKENS = [[3, 1, 41, 59, 26, 5, 35]]
State = dict[str, torch.Tensor]
# the tensors of a linear layer, without its name, and the matrix that they stand for
Written = tuple[State, torch.Tensor]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns] → int32 [rows, columns * bits / 32], the first column in the lowest bits"""
    words = torch.zeros(len(values), values.shape[1] * bits // 32, dtype=torch.int64)
    for index in range(32 // bits):
        words |= values[:, index :: 32 // bits].long() << (bits * index)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Return values [out, in], zeros and scales [out, groups], of groups with both."""
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.amin(2)
    scales = ((groups.amax(2) - smallest) / (2**bits - 1)).half().float()
    zeros = (-smallest / scales).round().clamp(1, 2**bits - 1)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.flatten(1), zeros, scales


def matrix(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = values.unflatten(1, (-1, GROUP))
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


def gptq(weight: torch.Tensor, bits: int = 4, ordered: bool = False, offset: int = 1) -> Written:
    order = torch.arange(weight.shape[1])
    if ordered:  # columns of a group are not neighbours
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
    values, zeros, scales = grouped(weight[:, order], bits)
    back = order.argsort()
    tensors = {
        "qweight": pack(values[:, back], bits).t(),
        "qzeros": pack(zeros.t() - offset, bits),
        "scales": scales.t().half(),
        "g_idx": (back // GROUP).int(),
    }
    return tensors, matrix(values, zeros, scales)[:, back]


def awq(weight: torch.Tensor) -> Written:
    values, zeros, scales = grouped(weight, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": pack(values.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "qzeros": pack(zeros.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "scales": scales.t().half(),
    }
    return tensors, matrix(values, zeros, scales)


def packed(weight: torch.Tensor, symmetric: bool = False) -> Written:
    values, zeros, scales = grouped(weight, 4)
    if symmetric:
        groups = weight.unflatten(1, (-1, GROUP))
        scales = groups.abs().amax(2) / 7
        zeros = torch.full_like(scales, 8)
        values = ((groups / scales[..., None]).round() + 8).flatten(1)
    tensors = {
        "weight_packed": pack(values, 4),
        "weight_scale": scales.bfloat16().float(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": pack(zeros.t(), 4).t(),
    }
    if symmetric:
        del tensors["weight_zero_point"]
    return tensors, matrix(values, zeros, tensors["weight_scale"])


def fp8(weight: torch.Tensor, scales: torch.Tensor, name: str = "weight_scale") -> Written:
    """scales: one, [out, 1], or one per block of 16 × 32"""
    spread = scales
    if scales.dim() == 2 and scales.shape[1] > 1:
        spread = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, name: scales, "input_scale": torch.ones(1)}, stored.float() * spread


def int8(weight: torch.Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored * scales


def llm_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {
        "weight": stored,
        "SCB": largest,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return tensors, stored * largest[:, None] / 127


def nf4(weight: torch.Tensor, nested: bool = False) -> Written:
    levels = torch.linspace(-1, 1, 16) ** 3
    flat = weight.flatten().view(-1, 32)
    largest = flat.abs().amax(1)
    state: dict[str, Any] = {"shape": list(weight.shape), "blocksize": 32, "quant_type": "nf4"}
    tensors: State = {"weight.absmax": largest, "weight.quant_map": levels}
    if nested:
        offset = largest.mean()
        code = torch.linspace(-1, 1, 256)
        blocks = (largest - offset).view(-1, 16)
        scales = blocks.abs().amax(1)
        closest = (blocks / scales[:, None])[..., None] - code
        indices = closest.abs().argmin(-1)
        largest = (code[indices] * scales[:, None]).flatten() + offset
        state |= {"nested_blocksize": 16, "nested_offset": float(offset)}
        tensors["weight.absmax"] = indices.flatten().to(torch.uint8)
        tensors["weight.nested_absmax"] = scales
        tensors["weight.nested_quant_map"] = code
    closest = (flat / largest[:, None])[..., None] - levels
    indices = closest.abs().argmin(-1)
    pairs = indices.view(-1, 2)
    tensors["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    return tensors, (levels[indices] * largest[:, None]).view(weight.shape)


def per_block(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 32))
    return blocks.abs().amax((1, 3)) / 448


def config_groups(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8)),
    "gptq-ordered": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, ordered=True)),
    "gptq-2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, offset=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, awq),
    "w4a16": (config_groups(num_bits=4), packed),
    "w4a16-symmetric": (config_groups(num_bits=4), lambda w: packed(w, symmetric=True)),
    "w8a8": (config_groups(num_bits=8), int8),
    "fp8-channel": (config_groups(num_bits=8), lambda w: fp8(w, w.abs().amax(1, True) / 448)),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, w.max())),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        lambda w: fp8(w, per_block(w), "weight_scale_inv"),
    ),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "nf4-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda w: nf4(w, nested=True),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    random_model(config_of("qwen2")).save_pretrained(folder)
    return folder


def write(plain: Path, folder: Path, name: str) -> Path:
    """Write the quantised model to `quantised`, and what it stands for to `meant`."""
    settings, quantise = FORMATS[name]
    state = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quantised: State = {}
    meant: State = {}
    for tensor_name, tensor in state.items():
        if not tensor_name.endswith("_proj.weight"):
            quantised[tensor_name] = meant[tensor_name] = tensor
            continue
        stem = tensor_name.removesuffix(".weight")
        tensors, meant[tensor_name] = quantise(tensor)
        quantised |= {f"{stem}.{kind}": value for kind, value in tensors.items()}
    save(folder / "meant", config, meant)
    save(folder / "quantised", {**config, "quantization_config": settings}, quantised)
    return folder / "quantised"


def save(folder: Path, config: dict[str, Any], state: State) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_has_the_matrices_that_the_quantised_ones_stand_for(plain, tmp_path, name):
    spec, tensors = folder_tensors(write(plain, tmp_path, name))
    _, meant = folder_tensors(tmp_path / "meant")
    _, before = folder_tensors(plain)
    assert tensors.keys() == meant.keys()
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor, meant[parameter], rtol=1e-6, atol=1e-7)
    weight = "transformer.layers.1.mlp.proj.weight"
    rounding = (tensors[weight] - before[weight]).abs().max()
    assert 0 < rounding < 0.1  # the largest weights are about 0.4
    (ours,) = logits_of(spec, tensors, torch.float32, TOKENS)
    (expected,) = logits_of(spec, meant, torch.float32, TOKENS)
    assert (ours - expected).abs().max() < 1e-5


def test_a_build_says_that_it_expands_the_weights(plain, tmp_path):
    folder = write(plain, tmp_path, "awq")
    phases: list[str] = []
    build_engine(
        folder, tmp_path / "engine", progress=lambda phase, done, total: phases.append(phase)
    )
    assert set(phases) == {"weights, expanded from awq"}


def change(folder: Path, edit: Callable[[State], object]) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq", "scales"),
        ("awq", "qzeros"),
        ("w4a16", "weight_scale"),
        ("w8a8", "weight_scale"),
        ("nf4", "weight.absmax"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ],
)
def test_a_missing_tensor_is_named(plain, tmp_path, name, kind):
    folder = write(plain, tmp_path, name)
    stem = "model.layers.1.self_attn.q_proj"
    change(folder, lambda state: state.pop(f"{stem}.{kind}"))
    shown = kind.partition(".bitsandbytes")[0]
    with pytest.raises(SourceError, match=rf"{stem} is quantised.*has no {shown}; download"):
        HuggingFaceFolder(folder, "tiny")


@pytest.mark.parametrize(("name", "kind"), [("gptq", "scales"), ("nf4", "weight.absmax")])
def test_tensors_that_do_not_fit_together_are_refused(plain, tmp_path, name, kind):
    folder = write(plain, tmp_path, name)
    stem = "model.layers.1.self_attn.q_proj"
    full = f"{stem}.{kind}"
    change(folder, lambda state: state.update({full: state[full].flatten()[:3].contiguous()}))
    with pytest.raises(SourceError, match=rf"{stem}: its \w+ tensors do not fit together"):
        folder_tensors(folder)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "mxfp4"}, r"quantised \(mxfp4\), which is not read"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"quantised \(modelopt, NVFP4\), which is not read",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout of GEMM.*not read"),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq, 3 bits\), which is not read"),
    ],
)
def test_a_layout_that_is_not_read_is_named_with_what_to_do(plain, tmp_path, settings, text):
    folder = write(plain, tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(SourceError, match=f"{text}.*--use_weight_only"):
        HuggingFaceFolder(folder, "tiny")


def test_a_quantised_config_with_plain_tensors_is_refused(plain, tmp_path):
    folder = write(plain, tmp_path, "gptq")
    save_file(load_file(tmp_path / "meant" / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"quantised \(gptq\), but no tensor is"):
        HuggingFaceFolder(folder, "tiny")
