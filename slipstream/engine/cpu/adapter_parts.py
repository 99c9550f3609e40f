"""The parts of a step that torch carries out on the buffers of compiled code: LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.engine.cpu.step_parts import StepParts
from slipstream.engine.with_torch.arrays import as_tensor
from slipstream.kernels.activation import ACTIVATIONS


class AdapterPart:
    """Adds the output of the tokens' adapters to a linear layer's output."""

    def __init__(
        self,
        layer: int,
        linear: int,
        x: np.ndarray,
        outputs: Sequence[np.ndarray],
        scale: float = 1.0,
    ) -> None:
        """x: [tokens, in]; outputs: the parts of the output, float32 [tokens, part] each; scale: of
        what is added
        """
        self._scale = scale
        self._layer = layer
        self._linear = linear
        self._x = as_tensor(x)
        self._outputs = [as_tensor(output) for output in outputs]

    @torch.inference_mode()
    def __call__(self, step: StepParts) -> None:
        assert step.adapters is not None
        x = self._x[: step.tokens]
        sizes = [output.shape[1] for output in self._outputs]
        added = torch.zeros(step.tokens, sum(sizes), dtype=x.dtype)
        step.adapters.add(added, x, self._layer, self._linear)
        for output, part in zip(self._outputs, added.split(sizes, dim=1), strict=True):
            output[: step.tokens] += part * self._scale


class ApplyGate:
    """Applies the activation between the MLP's linear layers."""

    def __init__(self, activation: str, parts: Sequence[np.ndarray], target: np.ndarray) -> None:
        """parts: the activated half and the multiplied half if the MLP is gated"""
        self._activate = ACTIVATIONS[activation]
        self._parts = [as_tensor(part) for part in parts]
        self._target = as_tensor(target)

    @torch.inference_mode()
    def __call__(self, step: StepParts) -> None:
        result = self._activate(self._parts[0][: step.tokens])
        for part in self._parts[1:]:
            result = result * part[: step.tokens]
        self._target[: step.tokens] = result
