"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.server.models.embeddings import unit_length
from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import convert_fields, decode_object
from slipstream.server.openai.models import OpenAIModel, find_model_or_default
from slipstream.server.openai.pooling.kinds import embedding_rule
from slipstream.server.openai.pooling.prompts import MAX_PROMPTS, PromptReader
from slipstream.server.openai.pooling.service import CallSource, PooledPrompt, PoolingCall
from slipstream.server.openai.prompts import Prompt, is_tokens
from slipstream.server.text.threads import in_thread_if_long


class EmbeddingFields(msgspec.Struct, kw_only=True):
    """The fields of a request. `user` is accepted and has no effect."""

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None  # not OpenAI's, but vLLM's


async def embedding_call(body: bytes, source: CallSource) -> PoolingCall:
    given = await in_thread_if_long(len(body), decode_object, body)
    fields = convert_fields(given, EmbeddingFields)
    model = await find_model_or_default(source.registry, fields.model)
    rule = embedding_rule(model, source.default_pooling)
    prompts = await in_thread_if_long(len(body), _read_inputs, fields.input)
    reader = PromptReader.create(model, fields.truncate_prompt_tokens)
    tokens = []
    for number, prompt in enumerate(prompts):
        tokens.append(
            await reader.read("input" if len(prompts) == 1 else f"input[{number}]", prompt)
        )
    identity = f"embd-{secrets.token_hex(12)}"
    writer = EmbeddingWriter(
        identity, model.id, fields.encoding_format, _read_dimensions(fields, model), rule.normalize
    )
    ignored = [name for name in given if name not in EmbeddingFields.__struct_fields__]
    return PoolingCall(identity, model, tokens, rule.kind, writer.write, ignored)


def _read_inputs(given: Any) -> list[Prompt]:
    prompts = [given] if isinstance(given, str) or is_tokens(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise field_error("input", "must be a string, a list of token ids, or a list of those")
    if len(prompts) > MAX_PROMPTS:
        raise field_error("input", f"must hold at most {MAX_PROMPTS} texts, got {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_tokens(prompt):
            raise field_error(f"input[{number}]", "must be a string or a list of token ids")
    return prompts


def _read_dimensions(fields: EmbeddingFields, model: OpenAIModel) -> int | None:
    size = model.text.engine.model.engine_config.spec.embedding_width
    if fields.dimensions is not None and not 1 <= fields.dimensions <= size:
        raise field_error("dimensions", f"must be between 1 and {size}, got {fields.dimensions}")
    return fields.dimensions


@dataclass(frozen=True)
class EmbeddingWriter:
    id: str
    model: str
    encoding: str
    dimensions: int | None  # numbers that are kept of each vector; None: all
    normalize: bool

    def write(self, pooled: Sequence[PooledPrompt]) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encode(one.vector)}
            for index, one in enumerate(pooled)
        ]
        tokens = sum(one.tokens for one in pooled)
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "list",
                "created": int(time.time()),
                "model": self.model,
                "data": data,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _encode(self, vector: np.ndarray) -> str | list[float]:
        kept = vector[: self.dimensions]
        if self.normalize:
            kept = unit_length(kept)
        if self.encoding == "base64":
            return base64.b64encode(kept.astype("<f4").tobytes()).decode()
        numbers: list[float] = kept.tolist()
        return numbers
