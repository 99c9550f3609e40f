"""The response cache: answers for later requests with the same inputs (`--cache-config`).

As in Triton, a model must enable it (`response_cache { enable: true }`) and answer exactly once.
Models that generate are never cached, because their answers depend on sampling. The least recently
used answers are evicted.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelVersion,
    ServedModel,
    WrappedModel,
)
from slipstream.server.kserve.tensor_bytes import pack

logger = logging.getLogger(__name__)

ENTRY_BYTES = 256  # memory of an entry besides the data of its tensors


class _Entry(NamedTuple):
    response: InferResponse
    byte_size: int


class ResponseCache:
    """Answers by the hash of their requests, up to a number of bytes."""

    def __init__(self, byte_size: int) -> None:
        self._room = byte_size
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def find(self, key: bytes) -> InferResponse | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.response

    def add(self, key: bytes, response: InferResponse) -> None:
        size = ENTRY_BYTES + sum(len(pack(tensor)) for tensor in response.outputs)
        if key in self._entries or size > self._room + self.byte_size:
            return  # another request was faster, or the answer does not fit an empty cache
        while size > self._room:
            self._room += self._entries.popitem(last=False)[1].byte_size
        self._entries[key] = _Entry(response, size)
        self._room -= size

    @property
    def byte_size(self) -> int:
        """The bytes in use."""
        return sum(entry.byte_size for entry in self._entries.values())

    def wrap(self, entry: ModelVersion) -> ServedModel:
        """Return the model, with the cache around it where it enables the cache and can use it."""
        model = entry.model
        if not wants_cache(model.config):
            return model
        stateful = model.config.sequence_batching is not None
        reason = ""
        if model.decoupled:
            reason = "decoupled"
        elif stateful:
            reason = "one of sequences"
        elif model.generates:
            reason = "one that generates"
        if not reason:
            return CachedModel(model, self)
        logger.warning(
            "model '%s' asks for the response cache, which serves no model that is %s",
            entry.name,
            reason,
            extra={"model": entry.name},
        )
        return model


def wants_cache(config: ModelConfig) -> bool:
    return bool((config.document.get("response_cache") or {}).get("enable"))


class CachedModel(WrappedModel):
    def __init__(self, model: ServedModel, cache: ResponseCache) -> None:
        super().__init__(model)
        self._cache = cache

    @property
    def cached(self) -> bool:
        return True

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        began = time.monotonic_ns()
        key = request_key(request)
        found = self._cache.find(key)
        looked_up = time.monotonic_ns()
        if found is not None:
            request.times.cache_hit_ns = looked_up - began
            yield found
            return
        request.times.cache_miss_ns = looked_up - began
        async with aclosing(self.inner.infer(request)) as responses:
            async for response in responses:
                if response.error is None:
                    began = time.monotonic_ns()
                    self._cache.add(key, response)
                    request.times.cache_miss_ns += time.monotonic_ns() - began
                yield response


def request_key(request: InferRequest) -> bytes:
    """Return a key that is equal for requests with equal model, inputs, outputs and parameters."""
    parameters = sorted(request.parameters.items(), key=repr)
    sequence = (request.sequence_id, request.sequence_start, request.sequence_end)
    whole = (request.model_name, request.model_version, request.outputs, parameters, sequence)
    digest = hashlib.sha256(repr(whole).encode("utf-8", "surrogateescape"))
    for name, tensor in sorted(request.inputs.items()):
        data = pack(tensor)
        digest.update(
            repr((name, tensor.datatype, tensor.shape, len(data))).encode(
                "utf-8", "surrogateescape"
            )
        )
        digest.update(data)
    return digest.digest()
