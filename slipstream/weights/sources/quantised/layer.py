"""The stored tensors of one quantised linear layer. Needs no torch until it reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from slipstream.weights.parameters import Shape, TensorSlot
from slipstream.weights.sources.mapped_tensors import MappedTensors
from slipstream.weights.sources.quantised.settings import Scheme
from slipstream.weights.sources.source import SourceError

if TYPE_CHECKING:
    import torch

    from slipstream.kernels.stored import StoredArray


@dataclass(frozen=True)
class QuantisedLayer:
    """A linear layer whose weight consists of several tensors, `stem`.qweight for example."""

    label: str  # of the source
    method: str
    stem: str
    scheme: Scheme
    tensors: MappedTensors
    slots: Mapping[str, TensorSlot]  # of all tensors that matter
    separator: str = "."  # between the stem and the kind of a tensor

    def has(self, kind: str) -> bool:
        return self._name(kind) in self.slots

    def slot(self, kind: str) -> TensorSlot:
        """Return the type and shape of a tensor. Raises SourceError if the file lacks it."""
        try:
            return self.slots[self._name(kind)]
        except KeyError:
            raise self.absent(kind) from None

    def matrix(self, kind: str) -> tuple[int, int]:
        """Return the shape of a tensor that has to be a matrix."""
        shape = self.slot(kind).shape
        if len(shape) != 2 or not prod(shape):
            raise SourceError(
                f"{self.label}: {self._name(kind)} has shape {list(shape)}, and must be a matrix; "
                "download the model again"
            )
        return shape[0], shape[1]

    def tensor(self, kind: str) -> torch.Tensor:
        return self.tensors.read_whole(self._name(kind))

    def array(self, kind: str) -> StoredArray:
        return self.tensors.map_array(self._name(kind))

    def _name(self, kind: str) -> str:
        return f"{self.stem}{self.separator}{kind}"

    def absent(self, kind: str) -> SourceError:
        return SourceError(
            f"{self.label}: {self.stem} is quantised ({self.method}) and has no {kind}; download "
            "the model again"
        )

    def misfit(self, kind: str, expected: str) -> SourceError:
        """Return the error about a tensor whose shape does not fit the others."""
        shape: Shape = self.slot(kind).shape
        return SourceError(
            f"{self.label}: {self.stem}: its {self.method} tensors do not fit together: {kind} has "
            f"shape {list(shape)}, where {expected}; download the model again"
        )
