"""Turn the tensors of an engine into linear layers, whatever format a weight is stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import linear_dispatch
from slipstream.kernels.linear import Linear
from slipstream.kernels.stored import check_all_taken


class Tensors:
    """The tensors of an engine. Each is taken exactly once; `close` raises an error that lists the
    missing and the unused ones.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        fp8_inputs: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """fp8_inputs: whether linear layers with e4m3 weights may round their activations to
        e4m3, too; batch_invariant: return such linear layers
        """
        self._left = dict(tensors)
        self._fp8_inputs = fp8_inputs
        self.batch_invariant = batch_invariant
        self._missing: list[str] = []
        self.dtype = dtype
        self.device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter on the run's device, in this type or else the run's type."""
        tensor = self._take(name)
        if tensor is None:
            return torch.empty(0)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, the model's config says {shape}"
            )
        return self._own(tensor, dtype)

    def linear(self, name: str, outputs: int, inputs: int, bias: bool) -> Linear:
        """Return the linear layer with weight `name`.weight, in the format the engine holds."""
        return self.in_form(self._linear(name, outputs, inputs, bias))

    def in_form(self, linear: Linear) -> Linear:
        """Return a linear layer in the form of this engine: batch-invariant or as it is."""
        return linear.batch_invariant() if self.batch_invariant else linear

    def _linear(self, name: str, outputs: int, inputs: int, bias: bool) -> Linear:
        offset = self.take(f"{name}.bias", (outputs,)) if bias else None
        scales = self._left.pop(f"{name}.scales", None)
        if scales is None:
            weight = self.take(f"{name}.weight", (outputs, inputs))
            return linear_dispatch.unquantised(weight, offset) if weight.numel() else _Missing()
        stored = self._take(f"{name}.weight")
        if stored is None:
            return _Missing()
        weight = stored.to(self.device)
        scales = scales.to(self.device)
        shape = tuple(weight.shape)
        if weight.dtype == torch.int8 and shape == (outputs, inputs):
            return linear_dispatch.int8(weight, scales, offset, self.dtype)
        if weight.dtype == torch.uint8 and shape == (outputs, inputs // 2):
            return linear_dispatch.int4(weight, scales, offset, self.dtype)
        if weight.dtype == torch.float8_e4m3fn and shape == (outputs, inputs):
            return linear_dispatch.fp8(weight, scales, offset, self.dtype, self._fp8_inputs)
        raise ValueError(
            f"{name}.weight: {weight.dtype} {shape} is no form of [{outputs}, {inputs}]"
        )

    def linears(
        self, name: str, count: int, outputs: int, inputs: int, bias: bool = False
    ) -> list[Linear]:
        """Return the `count` linear layers whose weights `name`.weight holds one after another."""
        for kind in ("weight", "scales", "bias"):
            stacked = self._left.get(f"{name}.{kind}")
            if stacked is not None and stacked.shape[0] == count * outputs:
                del self._left[f"{name}.{kind}"]
                for index, part in enumerate(stacked.chunk(count)):
                    self._left[f"{name}.{index}.{kind}"] = part
        return [self.linear(f"{name}.{i}", outputs, inputs, bias) for i in range(count)]

    def stacked(
        self, name: str, count: int, outputs: int, inputs: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the same weights as one tensor [count, outputs, inputs], and the scales [count,
        outputs] of 8-bit weights.
        """
        scales = self._left.pop(f"{name}.scales", None)
        if scales is None:
            weight = self.take(f"{name}.weight", (count * outputs, inputs))
            return weight.reshape(-1, outputs, inputs), None
        stored = self._take(f"{name}.weight")
        if stored is None or stored.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(
                f"{name}: experts of four bits run on a CPU only; build the engine with eight, "
                "or without"
            )
        weight = stored.to(self.device).view(count, outputs, inputs)
        return weight, scales.to(self.device).view(count, outputs)

    def takes_fp8_inputs(self, name: str) -> bool:
        """Return whether the linear layer of this name multiplies e4m3 activations, so that the
        kernel before it may quantise them.
        """
        weight = self._left.get(f"{name}.weight")
        if weight is None or not self._fp8_inputs:
            return False
        return linear_dispatch.supports_fp8_gemm(weight, self.dtype, self.device)

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return an unquantised weight without taking it; None if it is quantised or missing."""
        tensor = self._left.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype.itemsize == 1:
            return None
        return self._own(tensor)

    def discard(self, name: str) -> None:
        """Drop a tensor that is used under another name, or was only peeked at."""
        self._left.pop(name, None)

    def has(self, name: str) -> bool:
        return name in self._left

    def close(self) -> None:
        """Raise an error that lists the missing and the unused tensors, if there are any."""
        check_all_taken(self._missing, self._left)

    def _own(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the run's device. On a CPU always a copy: a tensor of a mapped file
        keeps the whole file in memory.
        """
        on_cpu = self.device.type == "cpu"
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=on_cpu)

    def _take(self, name: str) -> Tensor | None:
        tensor = self._left.pop(name, None)
        if tensor is None:
            self._missing.append(name)
        return tensor


class _Missing(Linear):
    """The place of a layer whose weight is missing: `close` raises before the model runs."""
