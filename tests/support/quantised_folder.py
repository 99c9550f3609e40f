"""A model folder whose layers are quantised to 4 bits by the layouts of GPTQ and AWQ."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns] → int32 [rows, columns * bits / 32], the first column in the lowest bits"""
    words = torch.zeros(len(values), values.shape[1] * bits // 32, dtype=torch.int64)
    for index in range(32 // bits):
        words |= values[:, index :: 32 // bits].long() << (bits * index)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantise_folder(folder: Path, method: str, symmetric: bool = False) -> Path:
    """Quantise the layers of a folder of Llama's, Mixtral's or GPT-2's names in place, and return it."""
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if _is_layer(name)]:
        weight = state.pop(name)
        by_inputs = ".c_" in name  # of GPT-2
        matrix = weight.float().t() if by_inputs else weight.float()
        stem = name.removesuffix(".weight")
        for kind, tensor in _quantise(matrix, method, symmetric).items():
            state[f"{stem}.{kind}"] = tensor.contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP, "sym": symmetric}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def _is_layer(name: str) -> bool:
    experts = (".w1.weight", ".w2.weight", ".w3.weight")  # of Mixtral
    others = ("_proj.weight", ".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return name.endswith((*experts, *others))


def _quantise(weight: torch.Tensor, method: str, symmetric: bool) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))  # [out, groups, 32]
    smallest = groups.amin(2)
    scales = ((groups.amax(2) - smallest) / 15).half().float()
    zeros = (-smallest / scales).round().clamp(1, 15)
    if symmetric:
        scales = (groups.abs().amax(2) / 7).half().float()
        zeros = torch.full_like(scales, 8)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    if method == "gptq":
        return {
            "qweight": pack(values, 4).t(),
            "qzeros": pack(zeros.t() - 1, 4),
            "scales": scales.t().half(),
            "g_idx": torch.arange(weight.shape[1]).int() // GROUP,
        }
    return {
        "qweight": pack(_in_awq_order(values.t()), 4),
        "qzeros": pack(_in_awq_order(zeros.t()), 4),
        "scales": scales.t().half(),
    }


def _in_awq_order(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
