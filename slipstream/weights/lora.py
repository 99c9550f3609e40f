"""A PEFT adapter to the two tensors that a request carries it in (hf_lora_convert.py).

    model.lora_weights.npy  [1, modules, longest row]  A [rank, in] flat, then B [out, rank] flat, zeros behind
    model.lora_config.npy   [1, modules, 3]            module number, layer, rank

B is multiplied by alpha / rank (alpha / sqrt(rank) with rsLoRA), because a server adds what it is sent as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.weights.engine_config import CONFIG_NAME
from slipstream.weights.hf_folder import read_json
from slipstream.weights.source import SourceError
from slipstream.weights.whole_folder import whole_folder

if TYPE_CHECKING:
    import numpy
    import torch

WEIGHTS_NAME, CONFIG_FILE = "model.lora_weights.npy", "model.lora_config.npy"
MODULE_NUMBERS = {"attn_qkv": 0, "attn_q": 1, "attn_k": 2, "attn_v": 3, "attn_dense": 4, "mlp_h_to_4h": 5,
                  "mlp_4h_to_h": 6, "mlp_gate": 7}
_MODULES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense",
            "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate", "c_attn": "attn_qkv"}
_KEY = re.compile(r".*\.(?:layers|h)\.(\d+)\.(?:self_attn|mlp|attn)\.(\w+)\.lora_(A|B)(?:\.default)?\.weight")
_STORAGE_TYPES = ("float16", "float32")


class Adapter(NamedTuple):
    weights: numpy.ndarray[Any, Any]
    config: numpy.ndarray[Any, Any]
    skipped: tuple[str, ...]  # tensors that have no place in the protocol


def convert_adapter(folder: Path, output: Path, storage_type: str = "float16") -> Adapter:
    """Write the two files into `output`, which appears whole or not at all; SourceError says what is wrong."""
    import numpy

    if storage_type not in _STORAGE_TYPES:
        raise SourceError(f"storage type {storage_type} cannot be stored in a .npy file; "
                          f"use {' or '.join(_STORAGE_TYPES)}")
    adapter = read_adapter(folder, storage_type)
    with whole_folder(output, CONFIG_FILE) as staging:
        numpy.save(staging / WEIGHTS_NAME, adapter.weights, allow_pickle=False)
        numpy.save(staging / CONFIG_FILE, adapter.config, allow_pickle=False)
    return adapter


def read_adapter(folder: Path, storage_type: str) -> Adapter:
    import numpy

    settings = read_json(folder / f"adapter_{CONFIG_NAME}")
    pairs, skipped = _pairs(_read_tensors(folder))
    if not pairs:
        raise SourceError(f"{folder}: no adapted module was found in it; known modules: {', '.join(_MODULES)}")
    rows, config = [], []
    for (layer, module), matrices in sorted(pairs.items(), key=lambda item: (item[0][0], MODULE_NUMBERS[item[0][1]])):
        if set(matrices) != {"A", "B"}:
            raise SourceError(f"{folder}: layer {layer}, {module}: lora_A and lora_B must come together")
        rank = _rank(settings, matrices)
        first, second = matrices["A"].float(), matrices["B"].float() * _scale(settings, rank)
        first = first if first.shape[0] == rank else first.t()  # to [rank, in]
        second = second if second.shape[1] == rank else second.t()  # to [out, rank]
        rows.append(numpy.concatenate([first.numpy().ravel(), second.numpy().ravel()]))
        config.append([MODULE_NUMBERS[module], layer, rank])
    weights = numpy.zeros((1, len(rows), max(map(len, rows))), dtype=storage_type)
    for position, row in enumerate(rows):
        weights[0, position, : len(row)] = row
    return Adapter(weights, numpy.array([config], dtype=numpy.int32), skipped)


def _read_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    if path.is_file():
        return load_file(path)
    if (folder / "adapter_model.bin").is_file():
        raise SourceError(f"{folder}: adapter_model.bin is a pickle, which may run code and is not read; save it as "
                          "adapter_model.safetensors (peft: model.save_pretrained(..., safe_serialization=True))")
    raise SourceError(f"{folder}: no adapter_model.safetensors in it")


def _pairs(tensors: Mapping[str, Any]) -> tuple[dict[tuple[int, str], dict[str, Any]], tuple[str, ...]]:
    pairs: dict[tuple[int, str], dict[str, Any]] = {}
    skipped = []
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or match.group(2) not in _MODULES:
            skipped.append(name)
        else:
            key = (int(match.group(1)), _MODULES[match.group(2)])
            pairs.setdefault(key, {})[match.group(3)] = tensor
    return pairs, tuple(skipped)


def _rank(settings: Mapping[str, Any], matrices: Mapping[str, Any]) -> int:
    """The one size that both matrices share; the config's where both sizes of both are equal."""
    shared = set(matrices["A"].shape) & set(matrices["B"].shape)
    rank = settings.get("r")
    if isinstance(rank, int) and rank in shared:
        return rank
    if len(shared) == 1:
        return int(shared.pop())
    raise SourceError(f"the adapter's rank {rank!r} does not fit its matrices "
                      f"{list(matrices['A'].shape)} and {list(matrices['B'].shape)}")


def _scale(settings: Mapping[str, Any], rank: int) -> float:
    alpha = float(settings.get("lora_alpha", rank))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
