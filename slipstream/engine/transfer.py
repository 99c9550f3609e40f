"""From the host's memory to the device's, without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that the host need not wait for, through memory that the device can read by itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and array.size:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers(
    values: Sequence[int] | Sequence[float] | Sequence[bool], device: torch.device
) -> Tensor:
    """[n], of the type that torch gives such numbers. Lists as such, also as an index, would make
    the host wait.
    """
    array = np.array(values)
    return to_device(array.astype(np.float32) if array.dtype == np.float64 else array, device)
