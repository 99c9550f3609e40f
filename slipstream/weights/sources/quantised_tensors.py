"""Quantised checkpoints of other libraries, read as the matrices that they stand for.

A build may quantise these again; their bits are not kept. The layouts, for a linear layer `P`:

    GPTQ                P.qweight [in * bits / 32, out], P.qzeros, P.scales [groups, out], P.g_idx
    AWQ                 P.qweight [in, out / 8], P.qzeros [groups, out / 8], P.scales [groups, out]
    compressed-tensors  P.weight_packed [out, in * bits / 32], P.weight_scale [out, groups]
    8 bits              P.weight [out, in] in int8 or e4m3, with P.weight_scale (one, one per row or
                        one per block), P.weight_scale_inv (one per block) or P.SCB (bitsandbytes)
    bitsandbytes NF4    P.weight [out * in / 2, 1], P.weight.absmax, P.weight.quant_map, its state
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.weights.parameters import TensorSlot
from slipstream.weights.sources.mapped_tensors import MappedTensors
from slipstream.weights.sources.source import SourceError

if TYPE_CHECKING:
    import torch

_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "bitsandbytes")
# scales of activations and of the KV cache, which weights do not need
_IGNORED = re.compile(
    r".*\.(input_scale|activation_scale|output_scale|input_zero_point|weight_format|[kv]_scale|[qkv]_bmm_scale"
    r"|input_global_scale)"
)
_EIGHT_BITS = ("I8", "F8_E4M3")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits, from the lowest
_READ_AS = "F32"


class _Packed(NamedTuple):
    """A quantised matrix, and the stored tensors that it consists of."""

    layout: str
    stem: str  # the name of the linear layer
    shape: tuple[int, int]


class QuantisedTensors:
    """The tensors of a quantised checkpoint, with a float matrix for each quantised one."""

    def __init__(self, tensors: MappedTensors, settings: Mapping[str, Any], label: str) -> None:
        """settings: `quantization_config` of the model's config.json"""
        self._tensors = tensors
        self._settings = settings
        self._label = label
        self.method = str(settings.get("quant_method"))
        self._stored = {
            name: slot for name, slot in tensors.slots.items() if not _IGNORED.fullmatch(name)
        }
        self._packed = self._find()
        if not self._packed:
            raise SourceError(
                f"{label}: its config.json says that the weights are quantised ({self.method}), "
                "but no tensor is, in a layout that is read; import the unquantised model"
            )
        parts = tuple(f"{packed.stem}." for packed in self._packed.values())
        kept = {
            name: slot
            for name, slot in self._stored.items()
            if not name.startswith(parts) or name.endswith(".bias")
        }
        self.slots = {
            **kept,
            **{name: TensorSlot(_READ_AS, item.shape) for name, item in self._packed.items()},
        }

    @property
    def dtype(self) -> str | None:
        return self._tensors.dtype

    def fingerprint(self) -> str:
        return self._tensors.fingerprint()

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        packed = self._packed.get(name)
        if packed is None:
            yield from self._tensors.read_rows(name)
            return
        read = {
            "gptq": self._read_gptq,
            "awq": self._read_awq,
            "packed": self._read_packed,
            "eight bits": self._read_eight_bits,
            "nf4": self._read_nf4,
        }[packed.layout]
        try:
            matrix = read(packed)
        except (RuntimeError, IndexError, KeyError, ValueError) as error:
            raise SourceError(
                f"{self._label}: {packed.stem}: its {self.method} tensors do not fit together "
                f"({str(error).splitlines()[0]}); download the model again"
            ) from error
        yield matrix

    def _find(self) -> dict[str, _Packed]:
        """Return the quantised matrices by the name of the matrix."""
        found: dict[str, _Packed] = {}
        for name, slot in self._stored.items():
            stem, _, kind = name.rpartition(".")
            packed: _Packed | None = None
            if kind == "qweight":
                packed = self._find_grouped(stem, slot)
            elif kind == "weight_packed":
                self._require(stem, "weight_scale")
                rows, columns = self._matrix(name, slot)
                packed = _Packed("packed", stem, (rows, columns * 32 // self._bits()))
            elif kind == "weight" and slot.dtype in _EIGHT_BITS:
                self._require_scale(stem)
                packed = _Packed("eight bits", stem, self._matrix(name, slot))
            elif kind == "weight" and slot.dtype == "U8":
                packed = self._find_nf4(stem)
            if packed is not None:
                found[f"{stem}.weight"] = packed
        return found

    def _find_grouped(self, stem: str, slot: TensorSlot) -> _Packed:
        self._require(stem, "qzeros", "scales")
        rows, columns = self._matrix(f"{stem}.qweight", slot)
        if self.method == "awq":
            if self._bits() != 4 or self._settings.get("version", "gemm") != "gemm":
                raise self._unread("AWQ with other than 4 bits in the layout of GEMM")
            return _Packed("awq", stem, (columns * 8, rows))
        return _Packed("gptq", stem, (columns, rows * 32 // self._bits()))

    def _find_nf4(self, stem: str) -> _Packed:
        self._require(stem, "weight.absmax", "weight.quant_map")
        state = self._nf4_state(stem)
        rows, columns = state["shape"]
        return _Packed("nf4", stem, (int(rows), int(columns)))

    def _nf4_state(self, stem: str) -> dict[str, Any]:
        names = [f"{stem}.weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
        for name in names:
            if name in self._stored:
                return dict(json.loads(bytes(self._tensors.read_numbers(name))))
        raise self._absent(stem, "weight.quant_state")

    def _bits(self) -> int:
        bits = self._settings.get("bits") or self._settings.get("w_bit")
        for group in (self._settings.get("config_groups") or {}).values():
            bits = (group.get("weights") or {}).get("num_bits", bits)
        if bits not in (2, 4, 8):
            raise self._unread(f"{bits} bits")
        return int(bits)

    def _matrix(self, name: str, slot: TensorSlot) -> tuple[int, int]:
        if len(slot.shape) != 2 or not prod(slot.shape):
            raise SourceError(
                f"{self._label}: {name} has shape {list(slot.shape)}, and must be a matrix; "
                "download the model again"
            )
        return slot.shape[0], slot.shape[1]

    def _require(self, stem: str, *kinds: str) -> None:
        for kind in kinds:
            if f"{stem}.{kind}" not in self._stored:
                raise self._absent(stem, kind)

    def _require_scale(self, stem: str) -> None:
        kinds = ("weight_scale", "weight_scale_inv", "SCB")
        if not any(f"{stem}.{kind}" in self._stored for kind in kinds):
            raise self._absent(stem, "weight_scale")

    def _absent(self, stem: str, kind: str) -> SourceError:
        return SourceError(
            f"{self._label}: {stem} is quantised ({self.method}) and has no {kind}; download the "
            "model again"
        )

    def _unread(self, what: str) -> SourceError:
        return unread(self._label, f"{self.method}, {what}")

    def _read(self, stem: str, kind: str) -> torch.Tensor:
        return self._tensors.read_whole(f"{stem}.{kind}")

    def _has(self, stem: str, kind: str) -> bool:
        return f"{stem}.{kind}" in self._stored

    def _read_gptq(self, packed: _Packed) -> torch.Tensor:
        import torch

        bits = self._bits()
        stem = packed.stem
        scales = self._read(stem, "scales").float()  # [groups, out]
        values = _unpack(self._read(stem, "qweight").t(), bits).t()  # [in, out]
        zeros = _unpack(self._read(stem, "qzeros"), bits)  # [groups, out]
        if self._settings.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)  # stored minus 1
        group = torch.arange(len(values)) // (len(values) // len(scales))
        if self._has(stem, "g_idx"):
            group = self._read(stem, "g_idx").long()
        matrix: torch.Tensor = (values - zeros[group]) * scales[group]
        return matrix.t().contiguous()

    def _read_awq(self, packed: _Packed) -> torch.Tensor:
        import torch

        order = torch.tensor(_AWQ_ORDER).argsort()
        stem = packed.stem

        def ordered(kind: str) -> torch.Tensor:
            eights: torch.Tensor = _unpack(self._read(stem, kind), 4).unflatten(1, (-1, 8))
            return eights[..., order].flatten(1)

        values = ordered("qweight")  # [in, out]
        scales = self._read(stem, "scales").float()  # [groups, out]
        each = len(values) // len(scales)
        zeros = ordered("qzeros").repeat_interleave(each, dim=0)
        matrix: torch.Tensor = (values - zeros) * scales.repeat_interleave(each, dim=0)
        return matrix.t().contiguous()

    def _read_packed(self, packed: _Packed) -> torch.Tensor:
        import torch

        bits = self._bits()
        stem = packed.stem
        rows, columns = packed.shape
        values = _unpack(self._read(stem, "weight_packed"), bits)  # [out, in]
        scales = self._read(stem, "weight_scale").float().reshape(rows, -1)  # [out, groups]
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
        if self._has(stem, "weight_zero_point"):
            zeros = _unpack(self._read(stem, "weight_zero_point").t(), bits).t()
        group = torch.arange(columns) // (columns // scales.shape[1])
        if self._has(stem, "weight_g_idx"):
            group = self._read(stem, "weight_g_idx").long()
        matrix: torch.Tensor = (values - zeros[:, group]) * scales[:, group]
        return matrix

    def _read_eight_bits(self, packed: _Packed) -> torch.Tensor:
        stem = packed.stem
        weight = self._read(stem, "weight").float()
        if self._has(stem, "SCB"):
            return weight * (self._read(stem, "SCB").float() / 127.0)[:, None]
        if self._has(stem, "weight_scale_inv"):
            scales = self._read(stem, "weight_scale_inv").float()
        else:
            scales = self._read(stem, "weight_scale").float()
        if self._has(stem, "weight_zero_point"):
            weight = weight - self._read(stem, "weight_zero_point").float()
        if scales.numel() == 1:
            return weight * scales.reshape(1, 1)
        if scales.numel() == len(weight):
            return weight * scales.reshape(-1, 1)
        tall, wide = self._block_size()
        spread = scales.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
        return weight * spread[: weight.shape[0], : weight.shape[1]]

    def _block_size(self) -> tuple[int, int]:
        size = self._settings.get("weight_block_size")
        for group in (self._settings.get("config_groups") or {}).values():
            size = (group.get("weights") or {}).get("block_structure") or size
        tall, wide = size or (128, 128)
        return int(tall), int(wide)

    def _read_nf4(self, packed: _Packed) -> torch.Tensor:
        import torch

        stem = packed.stem
        state = self._nf4_state(stem)
        both = self._read(stem, "weight").flatten()
        levels = torch.stack((both >> 4, both & 15), dim=1).flatten().long()
        values = self._read(stem, "weight.quant_map").float()[levels]
        largest = self._read(stem, "weight.absmax")
        if self._has(stem, "weight.nested_absmax"):
            scales = self._read(stem, "weight.nested_absmax").float()
            codes = self._read(stem, "weight.nested_quant_map").float()[largest.long()]
            block = torch.arange(len(codes)) // int(state["nested_blocksize"])
            largest = codes * scales[block] + float(state["nested_offset"])
        each = int(state["blocksize"])
        spread = largest.float().repeat_interleave(each)[: len(values)]
        return (values * spread).view(packed.shape)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words: int32 [rows, n] → int32 [rows, n * 32 / bits], from the lowest bits on"""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values: torch.Tensor = (words.contiguous()[..., None] >> shifts) & (2**bits - 1)
    return values.flatten(-2)


def check_method(label: str, settings: Mapping[str, Any]) -> None:
    """Raise SourceError if the layout of a quantised checkpoint is not read."""
    method = str(settings.get("quant_method"))
    algorithm = settings.get("quant_algo")
    if method not in _METHODS:
        raise unread(label, method)
    if method == "modelopt" and algorithm != "FP8":
        raise unread(label, f"{method}, {algorithm}")


def unread(label: str, how: str) -> SourceError:
    """Return the error about a quantised checkpoint whose layout is not read."""
    return SourceError(
        f"{label}: the weights are quantised ({how}), which is not read; import the unquantised "
        f"model and ask for --use_weight_only, or one quantised by {', '.join(_METHODS)}"
    )
