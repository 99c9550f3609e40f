"""The parts of a step that torch carries out on the buffers of compiled code: LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.activation import ACTIVATIONS
from slipstream.kernels.adapters import CpuStepAdapters


@dataclass(slots=True)
class StepParts:
    """What such parts need to know about a step."""

    tokens: int
    adapters: CpuStepAdapters | None = None


class AdapterPart:
    """Adds the output of the tokens' adapters to a linear layer's output."""

    def __init__(
        self, layer: int, linear: int, x: np.ndarray, outputs: Sequence[np.ndarray]
    ) -> None:
        """x: [tokens, in]; outputs: the parts of the output, float32 [tokens, part] each"""
        self._layer = layer
        self._linear = linear
        self._x = as_tensor(x)
        self._outputs = [as_tensor(output) for output in outputs]

    def __call__(self, step: StepParts) -> None:
        assert step.adapters is not None
        x = self._x[: step.tokens]
        sizes = [output.shape[1] for output in self._outputs]
        added = torch.zeros(step.tokens, sum(sizes), dtype=x.dtype)
        step.adapters.add(added, x, self._layer, self._linear)
        for output, part in zip(self._outputs, added.split(sizes, dim=1), strict=True):
            output[: step.tokens] += part


class ApplyGate:
    """Applies the activation between the MLP's linear layers."""

    def __init__(self, activation: str, parts: Sequence[np.ndarray], target: np.ndarray) -> None:
        """parts: the activated half and the multiplied half if the MLP is gated"""
        self._activate = ACTIVATIONS[activation]
        self._parts = [as_tensor(part) for part in parts]
        self._target = as_tensor(target)

    def __call__(self, step: StepParts) -> None:
        result = self._activate(self._parts[0][: step.tokens])
        for part in self._parts[1:]:
            result = result * part[: step.tokens]
        self._target[: step.tokens] = result


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor on the same memory; uint16 is bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
