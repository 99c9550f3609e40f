"""Read LoRA adapters, and convert PEFT adapters to request tensors like hf_lora_convert.py.

    model.lora_weights.npy  [1, modules, longest row]  A [rank, in], then B [out, rank], then zeros
    model.lora_config.npy   [1, modules, 3]            module number, layer, rank

B is multiplied by alpha / rank (alpha / sqrt(rank) with rsLoRA), because a server applies the
matrices without scaling.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.engine.adapters.cache import AdapterSource, ModuleMatrices
from slipstream.weights.engine_config import CONFIG_NAME
from slipstream.weights.sources.source import SourceError, read_json
from slipstream.weights.whole_folder import whole_folder

if TYPE_CHECKING:
    import numpy
    import torch

WEIGHTS_NAME = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
_OLD_CONFIG_FILE = "model.lora_keys.npy"  # name of the config file before 0.8
MODULE_NUMBERS = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
    "mlp_gate_up": 18,
}
_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "out_proj": "attn_dense",
    "attn.c_proj": "attn_dense",
    "qkv_proj": "attn_qkv",
    "c_attn": "attn_qkv",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
    "c_fc": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h",
    "query_key_value": "attn_qkv",
    "attention.dense": "attn_dense",
    "self_attention.dense": "attn_dense",
    "fc1": "mlp_h_to_4h",
    "fc2": "mlp_4h_to_h",
    "fc_in": "mlp_h_to_4h",
    "fc_out": "mlp_4h_to_h",
    "dense_h_to_4h": "mlp_h_to_4h",
    "dense_4h_to_h": "mlp_4h_to_h",
}
_KEY = re.compile(r".*\.(?:layers|h)\.(\d+)\.((?:\w+\.)*\w+)\.lora_(A|B)(?:\.default)?\.weight")
_STORAGE_TYPES = ("float16", "float32")
# Settings that change what an adapter computes → the values without an effect.
_PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": (None, "LORA"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}


class Adapter(NamedTuple):
    weights: numpy.ndarray[Any, Any]
    config: numpy.ndarray[Any, Any]
    skipped: tuple[str, ...]  # names of tensors that the protocol cannot express


def convert_adapter(folder: Path, output: Path, storage_type: str = "float16") -> Adapter:
    """Write the two files into `output`, which appears complete or not at all.

    Raises SourceError with one line.
    """
    import numpy

    if storage_type not in _STORAGE_TYPES:
        raise SourceError(
            f"storage type {storage_type} cannot be stored in a .npy file; "
            f"use {' or '.join(_STORAGE_TYPES)}"
        )
    adapter = read_adapter(folder, storage_type)
    with whole_folder(output, CONFIG_FILE) as staging:
        numpy.save(staging / WEIGHTS_NAME, adapter.weights, allow_pickle=False)
        numpy.save(staging / CONFIG_FILE, adapter.config, allow_pickle=False)
    return adapter


def read_adapter(folder: Path, storage_type: str) -> Adapter:
    import numpy

    modules, skipped = _read_modules(folder, _read_settings(folder))
    rows = [numpy.concatenate([module.first.ravel(), module.second.ravel()]) for module in modules]
    weights = numpy.zeros((1, len(rows), max(map(len, rows))), dtype=storage_type)
    for position, row in enumerate(rows):
        weights[0, position, : len(row)] = row
    config = [[module.module, module.layer, module.first.shape[0]] for module in modules]
    return Adapter(weights, numpy.array([config], dtype=numpy.int32), skipped)


def read_adapter_folder(folder: str) -> list[ModuleMatrices] | AdapterSource:
    """Return an adapter to serve, from a PEFT or a converted folder.

    Error texts hold the folder's name only, because they are sent to clients.
    """
    path = Path(folder)
    try:
        return _read_whole(path)
    except (SourceError, OSError) as error:
        raise SourceError(str(error).replace(folder, path.name)) from error


def _read_whole(path: Path) -> list[ModuleMatrices] | AdapterSource:
    """Return the complete adapter, or raise SourceError if a part of it is not supported."""
    if (path / WEIGHTS_NAME).is_file():
        return _read_converted(path)
    settings = _read_settings(path)
    for name, plain in _PLAIN_SETTINGS.items():
        if settings.get(name) not in plain:
            raise SourceError(
                f"{path.name}: {name} {json.dumps(settings[name])} of its adapter_{CONFIG_NAME} "
                "is not supported"
            )
    modules, skipped = _read_modules(path, settings)
    if skipped:
        raise SourceError(
            f"{path.name}: {skipped[0]} cannot be adapted here"
            + (f", nor can {len(skipped) - 1} other tensors" if len(skipped) > 1 else "")
        )
    return modules


def _read_converted(folder: Path) -> AdapterSource:
    import numpy

    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        config_file = folder / _OLD_CONFIG_FILE
    try:
        weights = numpy.load(folder / WEIGHTS_NAME, allow_pickle=False)
        config = numpy.load(config_file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{folder.name}: {error}") from error
    if weights.dtype.name not in _STORAGE_TYPES or config.ndim < 2 or config.shape[-1] != 3:
        raise SourceError(
            f"{folder.name}: {weights.dtype.name} weights with a config of shape "
            f"{list(config.shape)} are not an adapter; convert it with slipstream lora"
        )
    modules = [
        (int(module), int(layer), int(rank)) for module, layer, rank in config.reshape(-1, 3)
    ]
    return AdapterSource(weights=weights.tobytes(), datatype=weights.dtype.name, modules=modules)


def _read_settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / f"adapter_{CONFIG_NAME}")


def _read_modules(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[list[ModuleMatrices], tuple[str, ...]]:
    """Return the adapted modules with B scaled, and the names of the other tensors."""
    pairs, skipped = _pairs(_read_tensors(folder))
    if not pairs:
        raise SourceError(
            f"{folder}: no adapted module was found in it; known modules: {', '.join(_MODULES)}"
        )
    modules = []
    for (layer, module), matrices in sorted(
        pairs.items(), key=lambda item: (item[0][0], MODULE_NUMBERS[item[0][1]])
    ):
        if set(matrices) != {"A", "B"}:
            raise SourceError(
                f"{folder}: layer {layer}, {module}: lora_A and lora_B must come together"
            )
        rank = _rank(settings, matrices)
        first = matrices["A"].float()
        second = matrices["B"].float() * _scale(settings, rank)
        first = first if first.shape[0] == rank else first.t()  # to [rank, in]
        second = second if second.shape[1] == rank else second.t()  # to [out, rank]
        modules.append(ModuleMatrices(MODULE_NUMBERS[module], layer, first.numpy(), second.numpy()))
    return modules, skipped


def _read_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    if path.is_file():
        return load_file(path)
    if (folder / "adapter_model.bin").is_file():
        raise SourceError(
            f"{folder}: adapter_model.bin is a pickle, which may run code and is not read; "
            "save it as adapter_model.safetensors "
            "(peft: model.save_pretrained(..., safe_serialization=True))"
        )
    raise SourceError(f"{folder}: no adapter_model.safetensors in it")


def _pairs(
    tensors: Mapping[str, Any],
) -> tuple[dict[tuple[int, str], dict[str, Any]], tuple[str, ...]]:
    pairs: dict[tuple[int, str], dict[str, Any]] = {}
    skipped = []
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        module = _module(match.group(2)) if match else None
        if match is None or module is None:
            skipped.append(name)
        else:
            pairs.setdefault((int(match.group(1)), module), {})[match.group(3)] = tensor
    return pairs, tuple(skipped)


def _module(path: str) -> str | None:
    """Return the protocol's name of the module at a path within a layer, or None without one."""
    if "expert" in path:
        return None
    ends = path.split(".")
    return _MODULES.get(".".join(ends[-2:])) or _MODULES.get(ends[-1])


def _rank(settings: Mapping[str, Any], matrices: Mapping[str, Any]) -> int:
    """Return the size that both matrices share, or the config's rank if they share two sizes."""
    shared = set(matrices["A"].shape) & set(matrices["B"].shape)
    rank = settings.get("r")
    if isinstance(rank, int) and rank in shared:
        return rank
    if len(shared) == 1:
        return int(shared.pop())
    raise SourceError(
        f"the adapter's rank {rank!r} does not fit its matrices "
        f"{list(matrices['A'].shape)} and {list(matrices['B'].shape)}"
    )


def _scale(settings: Mapping[str, Any], rank: int) -> float:
    alpha = float(settings.get("lora_alpha", rank))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
