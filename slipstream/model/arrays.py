"""The weights of an engine as arrays of numpy. Each is taken once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slipstream.kernels.stored import Weight, shape_of, to_bfloat16, to_float32


class Arrays:
    """The weights of an engine. `close` raises an error that lists the missing and unused ones."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._left = dict(weights)
        self._missing: list[str] = []

    def take(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """Return a weight as stored; None if it is missing, which `close` reports."""
        weight = self._left.pop(name, None)
        if weight is None:
            self._missing.append(name)
        elif shape_of(weight) != shape:
            raise ValueError(f"{name}: shape {shape_of(weight)}, the model's config says {shape}")
        return weight

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a weight in float32; zeros if it is missing."""
        weight = self.take(name, shape)
        return np.zeros(shape, np.float32) if weight is None else to_float32(weight)

    def numbers(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return a weight as "float32", or as bits of "bfloat16"; zeros if it is missing."""
        if dtype == "float32":
            return self.floats(name, shape)
        weight = self.take(name, shape)
        return np.zeros(shape, np.uint16) if weight is None else to_bfloat16(weight)

    def has(self, name: str) -> bool:
        return name in self._left

    def close(self) -> None:
        """Raise an error that lists the missing and the unused weights, if there are any."""
        problems = []
        if self._missing:
            problems.append(f"missing tensors: {some(self._missing)}")
        if self._left:
            problems.append(f"unknown tensors: {some(sorted(self._left))}")
        if problems:
            raise ValueError("; ".join(problems))


def some(names: list[str]) -> str:
    """Return the first of these names as a text."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
