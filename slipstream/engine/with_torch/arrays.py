"""Tensors of torch as stored arrays, and arrays as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.stored import StoredArray, Weight

_CODES = {
    torch.float32: ("F32", None),
    torch.float16: ("F16", None),
    torch.bfloat16: ("BF16", torch.uint16),
    torch.int8: ("I8", None),
    torch.uint8: ("U8", None),
    torch.float8_e4m3fn: ("F8_E4M3", torch.uint8),
}


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Return arrays on the same memory."""
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        code, viewed = _CODES[tensor.dtype]
        found[name] = StoredArray(code, (tensor if viewed is None else tensor.view(viewed)).numpy())
    return found


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor on the same memory; uint16 is bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
