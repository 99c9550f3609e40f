"""From the tensors of an engine to callable products, whatever form a weight is stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import linear


class Tensors:
    """The tensors of an engine, each taken exactly once; what is missing or left over is an error
    that names it.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        eight_bit_inputs: bool = True,
    ) -> None:
        """`eight_bit_inputs`: whether products with e4m3 weights may round their activations to
        e4m3 too.
        """
        self._left = dict(tensors)
        self._eight_bit_inputs = eight_bit_inputs
        self._missing: list[str] = []
        self.dtype = dtype
        self.device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A parameter on the run's device, in this type or else the run's."""
        tensor = self._take(name)
        if tensor is None:
            return torch.empty(0)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, the model's config says {shape}"
            )
        return self._own(tensor, dtype)

    def product(self, name: str, outputs: int, inputs: int, bias: bool) -> linear.Product:
        """The product with weight `name`.weight, dense or quantised as the engine holds it."""
        offset = self.take(f"{name}.bias", (outputs,)) if bias else None
        scales = self._left.pop(f"{name}.scales", None)
        if scales is None:
            weight = self.take(f"{name}.weight", (outputs, inputs))
            return linear.dense(weight, offset) if weight.numel() else _nothing
        stored = self._take(f"{name}.weight")
        if stored is None:
            return _nothing
        weight, scales = stored.to(self.device), scales.to(self.device)
        if weight.dtype == torch.int8 and tuple(weight.shape) == (outputs, inputs):
            return linear.int8(weight, scales, offset, self.dtype)
        if weight.dtype == torch.uint8 and tuple(weight.shape) == (outputs, inputs // 2):
            return linear.int4(weight, scales, offset, self.dtype)
        if weight.dtype == torch.float8_e4m3fn and tuple(weight.shape) == (outputs, inputs):
            return linear.fp8(weight, scales, offset, self.dtype, self._eight_bit_inputs)
        raise ValueError(
            f"{name}.weight: {weight.dtype} {tuple(weight.shape)} is no form of [{outputs}, {inputs}]"
        )

    def products(self, name: str, count: int, outputs: int, inputs: int) -> list[linear.Product]:
        """The products with the `count` weights whose rows `name`.weight joins."""
        for kind in ("weight", "scales"):
            joined = self._left.get(f"{name}.{kind}")
            if joined is not None and joined.shape[0] == count * outputs:
                del self._left[f"{name}.{kind}"]
                self._left.update(
                    {f"{name}.{i}.{kind}": part for i, part in enumerate(joined.chunk(count))}
                )
        return [self.product(f"{name}.{i}", outputs, inputs, False) for i in range(count)]

    def stacked(
        self, name: str, count: int, outputs: int, inputs: int
    ) -> tuple[Tensor, Tensor | None]:
        """The same weights as one [count, outputs, inputs], with the scales [count, outputs] of
        eight-bit ones.
        """
        scales = self._left.pop(f"{name}.scales", None)
        if scales is None:
            return self.take(f"{name}.weight", (count * outputs, inputs)).reshape(
                -1, outputs, inputs
            ), None
        stored = self._take(f"{name}.weight")
        if stored is None or stored.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(
                f"{name}: experts of four bits run on a CPU only; build the engine with eight, or without"
            )
        return stored.to(self.device).view(count, outputs, inputs), scales.to(self.device).view(
            count, outputs
        )

    def takes_eight_bits(self, name: str) -> bool:
        """Whether the product of this name multiplies eight-bit activations: who makes them may
        quantise them.
        """
        weight = self._left.get(f"{name}.weight")
        if weight is None or not self._eight_bit_inputs:
            return False
        return linear.multiplies_eight_bits(weight, self.dtype, self.device)

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """A dense weight that a product will take too; None when it is quantised or missing."""
        tensor = self._left.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype.itemsize == 1:
            return None
        return self._own(tensor)

    def discard(self, name: str) -> None:
        """This tensor has been used by another name, or was only looked at."""
        self._left.pop(name, None)

    def has(self, name: str) -> bool:
        return name in self._left

    def close(self) -> None:
        """Say what did not fit, if anything."""
        problems = []
        if self._missing:
            problems.append(f"missing tensors: {_some(self._missing)}")
        if self._left:
            problems.append(f"unknown tensors: {_some(sorted(self._left))}")
        if problems:
            raise ValueError("; ".join(problems))

    def _own(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy where there would be none: a tensor of a mapped file keeps the whole file in
        memory.
        """
        return tensor.to(
            device=self.device, dtype=dtype or self.dtype, copy=self.device.type == "cpu"
        )

    def _take(self, name: str) -> Tensor | None:
        tensor = self._left.pop(name, None)
        if tensor is None:
            self._missing.append(name)
        return tensor


def _nothing(x: Tensor) -> Tensor:
    raise AssertionError("a model with missing tensors is never run")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
