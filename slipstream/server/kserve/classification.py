"""Triton's classification extension: the highest values of an output with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor

MAX_LABEL_BYTES = 16 << 20


def classify(tensor: Tensor, count: int, config: ModelConfig) -> Tensor:
    """Return the `count` highest values of each batch item as "value:index:label"."""
    if tensor.datatype in ("BYTES", "FP16", "BF16"):
        raise InferenceError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    batched = config.max_batch_size > 0
    rows = tensor.shape[0] if batched and tensor.shape else 1
    width = prod(tensor.shape[1:]) if batched else len(tensor.data)
    labels = _labels(config, tensor.name)
    kept = min(count, width)
    all_values = tensor.values()
    texts: list[bytes] = []
    for row in range(rows):
        values = all_values[row * width : (row + 1) * width]
        texts += [_class_text(values[index], index, labels) for index in _highest(values, kept)]
    shape = (rows, kept) if batched else (kept,)
    return Tensor(tensor.name, "BYTES", shape, texts)


def _highest(values: list[Any], count: int) -> list[int]:
    """Return the indices of the highest values, the highest first, equal ones in their order."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if isinstance(value, float) else str(int(value))
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode()


def _labels(config: ModelConfig, output: str) -> tuple[str, ...]:
    name = next((tensor.label_filename for tensor in config.outputs if tensor.name == output), "")
    return _read_labels(config.file.parent / name) if name else ()


@lru_cache(maxsize=64)
def _read_labels(file: Path) -> tuple[str, ...]:
    try:
        with file.open("rb") as opened:
            return tuple(opened.read(MAX_LABEL_BYTES).decode("utf-8", "replace").splitlines())
    except OSError as error:
        raise InferenceError(f"the labels of an output cannot be read: {error.strerror}") from error
