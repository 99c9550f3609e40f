"""The arrays of rows on a GPU: see `engine/rows.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.with_torch.transfer import PinnedBuffers, to_device

_TYPES = {np.int64: torch.int64, np.int32: torch.int32}


class DeviceArrays:
    """Arrays of torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = PinnedBuffers()  # for the masks of a step

    def filled(self, shape: tuple[int, ...], value: int, dtype: type[np.integer[Any]]) -> Tensor:
        return torch.full(shape, value, dtype=_TYPES[dtype], device=self.device)

    def upload(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)

    def download(self, array: Tensor) -> np.ndarray:
        return array.cpu().numpy()

    def put(self, array: Tensor, places: np.ndarray, values: np.ndarray | int) -> None:
        where = to_device(places, self.device)
        if isinstance(values, int):
            array.view(-1).index_fill_(0, where, values)
        else:
            array.view(-1)[where] = to_device(values, self.device)

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))
