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
