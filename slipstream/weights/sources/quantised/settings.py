"""What a model folder says about the quantisation of its weights. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.weights.sources.source import SourceError, read_json

_METHODS = (
    "gptq",
    "awq",
    "auto-round",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "bitsandbytes",
    "mxfp4",
)
# what ModelOpt calls its ways to quantise → the size of the blocks that share a scale
_MODELOPT_FP8: dict[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
}
_COMPRESSED_FORMATS = (
    None,
    "dense",
    "mixed-precision",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
)
_ROUND_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_LEAST_BLOCK = (128, 128)  # of HF's fp8, where its config names none


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is quantised, as far as the folder says. None: it does not say."""

    bits: int | None = None
    # "tensor", "channel", "group" or "block": the weights that share a scale
    strategy: str | None = None
    group_size: int | None = None  # columns of a group
    block: tuple[int, int] | None = None  # rows and columns of a block
    symmetric: bool | None = None


class _Group:
    """The layers of one scheme in a config of compressed-tensors."""

    def __init__(self, targets: Sequence[str], scheme: Scheme) -> None:
        self.targets = targets
        self.scheme = scheme
        try:
            self._patterns = [re.compile(one[3:]) for one in targets if one.startswith("re:")]
        except re.error as error:
            raise ValueError(f"targets of config_groups: {error}") from error

    def matches(self, module: str) -> bool:
        return any(pattern.match(module) for pattern in self._patterns)


class QuantisationSettings:
    """The `quantization_config` of a folder, or what it has in its place."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.method = str(given["quant_method"]).removeprefix("intel/")
        self._given = given
        self._groups = [
            _Group(group.get("targets") or (), _group_scheme(group.get("weights") or {}))
            for group in (given.get("config_groups") or {}).values()
        ]
        # whether layers may have other numbers of bits than `bits` says
        self.varies = bool(given.get("dynamic") or given.get("extra_config"))

    @property
    def layout(self) -> str:
        """Return the method whose layout integer weights have."""
        return _ROUND_PACKINGS.get(str(self._given.get("packing_format")), self.method)

    @property
    def stored_zeros_offset(self) -> int:
        """Return what GPTQ's stored zero points lack."""
        second = "gptq_v2" in (self._given.get("checkpoint_format"), self._given.get("format"))
        return 0 if second else 1

    def problem(self) -> str:
        """Return what of these settings is not read; empty: nothing."""
        given = self._given
        if self.method not in _METHODS:
            return self.method
        if self.method == "modelopt" and _algorithm(given) not in _MODELOPT_FP8:
            return f"{self.method}, {given.get('quant_algo')}"
        if self.method == "auto-round" and self.layout == self.method:
            return f"{self.method}, packed as {given.get('packing_format')}"
        if self.method == "compressed-tensors" and given.get("format") not in _COMPRESSED_FORMATS:
            return f"{self.method}, {given['format']}"
        if self.method == "gptq" and given.get("checkpoint_format") not in (
            None,
            "gptq",
            "gptq_v2",
        ):
            return f"{self.method}, packed as {given['checkpoint_format']}"
        if self.layout == "awq" and str(given.get("version") or "gemm").lower() != "gemm":
            return f"{self.method} for the kernel {given['version']}"
        return ""

    def scheme(self, module: str) -> Scheme:
        """Return the scheme of a linear layer, by the name of its module."""
        if self._groups:
            return _choose_group(self._groups, module)
        given = self._given
        bits = given.get("bits") or given.get("w_bit")
        group_size = given.get("group_size") or given.get("q_group_size")
        block = given.get("weight_block_size")
        if self.method == "fp8" and "weight_block_size" not in given:
            block = _LEAST_BLOCK
        if self.method == "modelopt":
            block = _MODELOPT_FP8[_algorithm(given)]
        return Scheme(
            bits=None if bits is None else int(bits),
            group_size=None if not group_size or group_size < 0 else int(group_size),
            block=None if block is None else (int(block[0]), int(block[1])),
            symmetric=given.get("sym"),
        )


def _algorithm(given: Mapping[str, Any]) -> str:
    """Return the name of ModelOpt's algorithm, which it writes in small letters, too."""
    return str(given.get("quant_algo")).upper()


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> QuantisationSettings | None:
    """Return how a model folder says that it is quantised; None: it is not."""
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    settings = settings or _read_own_file(folder)
    return QuantisationSettings(settings) if settings.get("quant_method") else None


def _read_own_file(folder: Path) -> dict[str, Any]:
    """Return the settings that a folder has in a file of the library that quantised it."""
    modelopt = folder / "hf_quant_config.json"
    if modelopt.is_file():
        algorithm = (read_json(modelopt).get("quantization") or {}).get("quant_algo")
        return {"quant_method": "modelopt", "quant_algo": algorithm} if algorithm else {}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            found = read_json(folder / name)
            return {"quant_method": method, **found}
    return {}


def _group_scheme(weights: Mapping[str, Any]) -> Scheme:
    size = weights.get("group_size")
    block = weights.get("block_structure")
    bits = weights.get("num_bits")
    return Scheme(
        bits=None if bits is None else int(bits),
        strategy=weights.get("strategy"),
        group_size=None if not size or size < 0 else int(size),
        block=None if block is None else (int(block[0]), int(block[1])),
        symmetric=weights.get("symmetric"),
    )


def _choose_group(groups: list[_Group], module: str) -> Scheme:
    """Return the scheme of the group that names a module, or that is for all linear layers."""
    named = [group for group in groups if module in group.targets]
    matching = [group for group in groups if group.matches(module)]
    general = [group for group in groups if "Linear" in group.targets]
    chosen = named or matching or general or (groups if len(groups) == 1 else [])
    return chosen[0].scheme if chosen else Scheme()


def unread(label: str, how: str) -> SourceError:
    """Return the error about a quantised checkpoint whose layout is not read."""
    return SourceError(
        f"{label}: the weights are quantised ({how}), which is not read; import the unquantised "
        f"model and ask for --use_weight_only, or one quantised by {', '.join(_METHODS)}"
    )
