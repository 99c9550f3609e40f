"""Quantised checkpoints of other libraries, read as the matrices that they stand for.

`quantised/` has a module for each kind of layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.weights.parameters import E4M3_FORM, Shape, TensorSlot
from slipstream.weights.sources.mapped_tensors import MappedTensors
from slipstream.weights.sources.quantised.bitsandbytes import read_table, table_shape
from slipstream.weights.sources.quantised.integers import integer_layouts
from slipstream.weights.sources.quantised.kept import (
    e4m3_rows,
    integer_blocks,
    integer_form,
    scaled_blocks,
    scaled_form,
)
from slipstream.weights.sources.quantised.layer import QuantisedLayer
from slipstream.weights.sources.quantised.mxfp4 import experts_shape, read_experts
from slipstream.weights.sources.quantised.scaled import read_scaled, scaled_shape
from slipstream.weights.sources.quantised.settings import QuantisationSettings
from slipstream.weights.sources.source import SourceError

if TYPE_CHECKING:
    import torch

# scales of activations and of the KV cache, which weights do not need
_IGNORED = re.compile(
    r".*\.(input_scale|input_scale_ub|activation_scale|output_scale|input_zero_point"
    r"|weight_format|[kv]_scale|[qkv]_bmm_scale|input_global_scale)"
)
_EIGHT_BITS = ("I8", "F8_E4M3")
_EXPERTS = "_blocks"  # the end of the name of MXFP4 experts


class _Quantised(NamedTuple):
    """A quantised matrix, or several in one tensor."""

    layer: QuantisedLayer
    slot: TensorSlot  # as which it is read
    read: Callable[[QuantisedLayer], Iterator[torch.Tensor]]
    # the form that keeps its bits in an engine, and its rows in this form; None: it is expanded
    form: Callable[[QuantisedLayer], str | None] = lambda layer: None
    blocks: Callable[[QuantisedLayer, str], np.ndarray] | None = None


class QuantisedTensors:
    """The tensors of a quantised checkpoint, with a float matrix for each quantised one."""

    def __init__(self, tensors: MappedTensors, settings: QuantisationSettings, label: str) -> None:
        self._tensors = tensors
        self._settings = settings
        self._label = label
        self.method = settings.method
        self._stored = {
            name: slot for name, slot in tensors.slots.items() if not _IGNORED.fullmatch(name)
        }
        self._integers = integer_layouts(settings)
        self._found = self._find()
        if not self._found:
            raise SourceError(
                f"{label}: its config.json says that the weights are quantised ({self.method}), "
                "but no tensor is, in a layout that is read; import the unquantised model"
            )
        parts = tuple(self._part_starts())
        kept = {
            name: slot
            for name, slot in self._stored.items()
            if not name.startswith(parts) or name.endswith(".bias")
        }
        self.slots = {**kept, **{name: found.slot for name, found in self._found.items()}}

    @property
    def dtype(self) -> str | None:
        return self._tensors.dtype

    def fingerprint(self) -> str:
        return self._tensors.fingerprint()

    def is_linear(self, name: str) -> bool:
        """Return whether a tensor is a quantised matrix [out, in], whatever its family stores."""
        return name in self._found and len(self._found[name].slot.shape) == 2

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        found = self._found.get(name)
        if found is None:
            yield from self._tensors.read_rows(name)
            return
        with self._naming(found.layer):
            yield from found.read(found.layer)

    @contextmanager
    def _naming(self, layer: QuantisedLayer) -> Iterator[None]:
        """Name the layer in errors about tensors whose content does not fit together."""
        try:
            yield
        except SourceError:
            raise
        except (RuntimeError, IndexError, KeyError, ValueError) as error:
            raise SourceError(
                f"{self._label}: {layer.stem}: its {self.method} tensors do not fit together "
                f"({str(error).splitlines()[0]}); download the model again"
            ) from error

    @cached_property
    def _forms(self) -> dict[str, str]:
        return {
            name: form
            for name, found in self._found.items()
            if (form := found.form(found.layer)) is not None
        }

    def forms(self) -> Mapping[str, str]:
        """Return the form of each matrix whose bits an engine can keep."""
        return self._forms

    def read_stored(self, name: str) -> np.ndarray:
        """Return all rows of such a matrix, in blocks: uint8 [rows, row bytes]."""
        found = self._found[name]
        assert found.blocks is not None, "it has a form"
        with self._naming(found.layer):
            return found.blocks(found.layer, self._forms[name])

    def _find(self) -> dict[str, _Quantised]:
        """Return the quantised matrices by the name of the matrix."""
        found: dict[str, _Quantised] = {}
        for name, slot in self._stored.items():
            stem, _, kind = name.rpartition(".")
            quantised: _Quantised | None = None
            if kind in self._integers:
                quantised = self._find_integers(stem, kind)
            elif kind == "weight" and slot.dtype in _EIGHT_BITS:
                found_as = self._found_as(stem, scaled_shape, _whole(read_scaled))
                quantised = found_as._replace(form=scaled_form, blocks=_scaled_blocks)
            elif kind == "weight" and slot.dtype == "U8":
                quantised = self._found_as(stem, table_shape, _whole(read_table))
            elif kind.endswith(_EXPERTS) and slot.dtype == "U8":
                stem = name.removesuffix(_EXPERTS)
                quantised = self._found_as(stem, experts_shape, read_experts, "_")
            if quantised is not None:
                found[f"{stem}.weight"] = quantised
        return found

    def _find_integers(self, stem: str, kind: str) -> _Quantised:
        layout = self._integers[kind]

        def read(layer: QuantisedLayer) -> Iterator[torch.Tensor]:
            import torch

            yield torch.from_numpy(layout.read(layer).expand())

        found = self._found_as(stem, layout.shape, read)
        return found._replace(
            form=lambda layer: integer_form(layer, layout),
            blocks=lambda layer, form: integer_blocks(layer, layout, form),
        )

    def _found_as(
        self,
        stem: str,
        shape: Callable[[QuantisedLayer], Shape],
        read: Callable[[QuantisedLayer], Iterator[torch.Tensor]],
        separator: str = ".",
    ) -> _Quantised:
        layer = QuantisedLayer(
            self._label,
            self.method,
            stem,
            self._settings.scheme(stem),
            self._tensors,
            self._stored,
            separator,
        )
        code = "F32" if separator == "." else "BF16"
        return _Quantised(layer, TensorSlot(code, shape(layer)), read)

    def _part_starts(self) -> Iterator[str]:
        """Yield how the names of the parts of quantised matrices begin."""
        for found in self._found.values():
            layer = found.layer
            kinds = ("",) if layer.separator == "." else ("blocks", "scales")
            yield from (f"{layer.stem}{layer.separator}{kind}" for kind in kinds)


def _scaled_blocks(layer: QuantisedLayer, form: str) -> np.ndarray:
    return e4m3_rows(layer) if form == E4M3_FORM else scaled_blocks(layer)


def _whole(
    read: Callable[[QuantisedLayer], torch.Tensor],
) -> Callable[[QuantisedLayer], Iterator[torch.Tensor]]:
    def read_one(layer: QuantisedLayer) -> Iterator[torch.Tensor]:
        yield read(layer)

    return read_one
