"""Copies from host to device memory that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device through pinned memory, without waiting."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and array.size:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def list_to_device(
    values: Sequence[int] | Sequence[float] | Sequence[bool], device: torch.device
) -> Tensor:
    """Copy a list [n] to the device, as the type that torch gives such numbers.

    Lists that are passed to torch directly, also as an index, make the host wait.
    """
    array = np.array(values)
    return to_device(array.astype(np.float32) if array.dtype == np.float64 else array, device)


class PinnedBuffers:
    """Pinned memory for one array that is copied to the device in each step.

    Pinning new memory costs about as much as a step of a small model. A buffer is used again when
    the steps that read it are over: fewer steps are in flight than there are buffers.
    """

    _COUNT = 4

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(self._COUNT)]
        self._next = 0

    def to_device(self, array: np.ndarray, device: torch.device) -> Tensor:
        """Copy an int32 array to the device without waiting."""
        index = self._next
        self._next = (index + 1) % self._COUNT
        if self._buffers[index].numel() < array.size:
            self._buffers[index] = torch.empty(
                2 * array.size, dtype=torch.int32, pin_memory=device.type == "cuda"
            )
        buffer = self._buffers[index][: array.size].view(array.shape)
        buffer.numpy()[:] = array
        return buffer.to(device, non_blocking=True)
