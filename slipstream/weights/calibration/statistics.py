"""What calibration finds out about the inputs of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.inputs import Input, plain
from slipstream.kernels.linear import Linear


@dataclass
class InputStatistics:
    """Sums over the tokens of a text.

    A change D of the weights [out, in] changes the outputs of all tokens by a squared error of
    trace(D × hessian × Dᵀ): no input has to be kept.
    """

    hessian: Tensor  # float32 [in, in]: sum of xᵀ x
    absolute: Tensor  # float32 [in]: sum of |x|
    tokens: int = 0

    @classmethod
    def empty(cls, size: int) -> InputStatistics:
        return cls(torch.zeros(size, size), torch.zeros(size))

    def add(self, x: Tensor) -> None:
        """x: float32 [tokens, in]"""
        self.hessian.addmm_(x.t(), x)
        self.absolute += x.abs().sum(0)
        self.tokens += len(x)

    @property
    def magnitudes(self) -> Tensor:
        """The mean absolute inputs [in]."""
        return self.absolute / max(self.tokens, 1)

    def divided(self, factors: Tensor) -> InputStatistics:
        """Return the same of inputs that are divided by factors [in]."""
        hessian = self.hessian / factors / factors[:, None]
        return InputStatistics(hessian, self.absolute / factors, self.tokens)


class ObservedLinear(Linear):
    """A linear layer whose inputs are counted."""

    def __init__(self, inner: Linear, found: InputStatistics) -> None:
        self._inner = inner
        self._found = found

    def __call__(self, x: Input) -> Tensor:
        self._found.add(plain(x))
        return self._inner(x)
