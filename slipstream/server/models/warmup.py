"""Runs the warm-up requests of a configuration (`model_warmup`) before a model serves clients."""

from __future__ import annotations

from contextlib import aclosing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, ServedModel
from slipstream.server.kserve.tensor_bytes import SIZES, IncompleteString, unpack
from slipstream.server.kserve.tensors import DTYPES, Array, Tensor

MAX_VALUES = 1 << 24
WARMUP_FOLDER = "warmup"


async def warm_up(model: ServedModel, config: ModelConfig, version: int) -> None:
    """Run every sample. Raises InferenceError where one fails: then the model must not serve."""
    for sample in config.document.get("model_warmup", []):
        for _ in range(sample["count"] or 1):
            await _run(model, config, version, sample)


async def _run(
    model: ServedModel, config: ModelConfig, version: int, sample: dict[str, Any]
) -> None:
    batch = (max(1, sample["batch_size"]),) if config.max_batch_size > 0 else ()
    inputs = {name: _tensor(config, name, given, batch) for name, given in sample["inputs"].items()}
    request = InferRequest(config.name, str(version), inputs)
    if config.sequence_batching is not None:  # a sequence of one request
        request.sequence_id = 1
        request.sequence_start = True
        request.sequence_end = True
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            if response.error is not None:
                text = f"failed to run warmup sample '{sample['name']}': {response.error.message}"
                raise InferenceError(text, Code.INTERNAL)


def _tensor(
    config: ModelConfig, name: str, given: dict[str, Any], batch: tuple[int, ...]
) -> Tensor:
    shape = (*batch, *given["dims"])
    datatype = given["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    count = prod(shape)
    if not 0 <= count <= MAX_VALUES or (datatype != "BYTES" and datatype not in SIZES):
        raise InferenceError(f"warmup input '{name}' has an impossible shape or datatype")
    if given.get("input_data_file"):
        data = _from_file(
            config.file.parent / WARMUP_FOLDER, given["input_data_file"], datatype, name
        )
        if len(data) != count:
            raise InferenceError(
                f"warmup input '{name}' needs {count} values, its file has {len(data)}"
            )
        return Tensor(name, datatype, shape, data)
    if given.get("random_data"):
        return Tensor(name, datatype, shape, _random_values(datatype, count))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, [b""] * count)
    return Tensor(name, datatype, shape, np.zeros(count, DTYPES[datatype]))


def _random_values(datatype: str, count: int) -> Array | list[bytes]:
    chance = np.random.default_rng()
    if datatype == "BYTES":
        return [bytes(letters) for letters in chance.choice([97, 98], (count, 8)).astype(np.uint8)]
    if datatype in ("FP16", "FP32", "FP64"):
        return chance.random(count).astype(DTYPES[datatype])
    return chance.integers(2 if datatype == "BOOL" else 100, size=count).astype(DTYPES[datatype])


def _from_file(folder: Path, file_name: str, datatype: str, name: str) -> Array | list[bytes]:
    file = folder / file_name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise InferenceError(
            f"the file of warmup input '{name}' lies outside the model's {WARMUP_FOLDER} folder"
        )
    try:
        raw = file.read_bytes()
        return unpack(datatype, raw[: len(raw) - len(raw) % SIZES.get(datatype, 1)])
    except OSError as error:
        raise InferenceError(
            f"the file of warmup input '{name}' cannot be read: {error.strerror}"
        ) from error
    except IncompleteString as error:
        raise InferenceError(f"the file of warmup input '{name}' is damaged: {error}") from error
