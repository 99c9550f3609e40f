"""POST /v1/rerank and /score: how well texts match, in the formats of vLLM, Jina and Cohere.

A model with a score layer reads each pair of texts at once. For an embedding model the score is the
cosine of the angle between the two embeddings.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from slipstream.server.models.embeddings import unit_length
from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import convert_fields, decode_object
from slipstream.server.openai.models import OpenAIModel, find_model_or_default
from slipstream.server.openai.pooling.kinds import embedding_rule, scores_pairs
from slipstream.server.openai.pooling.prompts import MAX_PROMPTS, PromptReader
from slipstream.server.openai.pooling.service import CallSource, PooledPrompt, PoolingCall
from slipstream.server.text.threads import in_thread_if_long

Texts = str | list[str]
SCORE_KIND = "score"


class RerankFields(msgspec.Struct, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None  # default: all documents
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    use_activation: bool = True  # whether a score layer's output goes through a sigmoid
    user: str | None = None


class ScoreFields(msgspec.Struct, kw_only=True):
    text_1: Texts
    text_2: Texts
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool = True
    user: str | None = None


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts, as the prompts of a model and the way to score them."""

    prompts: Sequence[list[int]]
    kind: str  # of pooling
    score: Callable[[Sequence[PooledPrompt]], list[float]]


async def rerank_call(body: bytes, source: CallSource) -> PoolingCall:
    given = await in_thread_if_long(len(body), decode_object, body)
    fields = convert_fields(given, RerankFields)
    model = await find_model_or_default(source.registry, fields.model)
    documents = [_document_text(number, one) for number, one in enumerate(fields.documents)]
    if not documents:
        raise field_error("documents", "must hold at least one document")
    if fields.top_n is not None and fields.top_n < 0:
        raise field_error("top_n", f"must be at least 0, got {fields.top_n}")
    names = ["query", *(f"documents[{number}]" for number in range(len(documents)))]
    reader = PairReader(model, fields.truncate_prompt_tokens, fields.use_activation, source)
    pairs = await reader.read(names, [fields.query], documents)
    identity = f"rerank-{secrets.token_hex(12)}"
    writer = RerankWriter(identity, model.id, pairs, documents, fields)
    ignored = [name for name in given if name not in RerankFields.__struct_fields__]
    return PoolingCall(identity, model, pairs.prompts, pairs.kind, writer.write, ignored)


async def score_call(body: bytes, source: CallSource) -> PoolingCall:
    given = await in_thread_if_long(len(body), decode_object, body)
    fields = convert_fields(given, ScoreFields)
    model = await find_model_or_default(source.registry, fields.model)
    first = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    second = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            raise field_error(name, "must hold at least one text")
    if len(first) not in (1, len(second)):
        raise field_error(
            "text_1", f"must hold one text, or as many as text_2 ({len(second)}), got {len(first)}"
        )
    names = [f"text_1[{number}]" for number in range(len(first))]
    names += [f"text_2[{number}]" for number in range(len(second))]
    reader = PairReader(model, fields.truncate_prompt_tokens, fields.use_activation, source)
    pairs = await reader.read(names, first, second)
    identity = f"score-{secrets.token_hex(12)}"
    writer = ScoreWriter(identity, model.id, pairs)
    ignored = [name for name in given if name not in ScoreFields.__struct_fields__]
    return PoolingCall(identity, model, pairs.prompts, pairs.kind, writer.write, ignored)


def _document_text(number: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise field_error(f"documents[{number}]", "must be a string, or an object with a text")
    return text


@dataclass(frozen=True)
class PairReader:
    model: OpenAIModel
    truncate: int | None
    use_activation: bool
    source: CallSource

    async def read(
        self, names: Sequence[str], first: Sequence[str], second: Sequence[str]
    ) -> Pairs:
        """Return the pairs of each of `second` with its text of `first`, or with the only one.

        `names`: the field of each text, for errors.
        """
        if len(first) + len(second) > MAX_PROMPTS:
            raise field_error(names[-1], f"is one of more than {MAX_PROMPTS} texts")
        reader = PromptReader.create(self.model, self.truncate)
        if scores_pairs(self.model):
            prompts = [
                await reader.read_pair(name, one, other)
                for name, one, other in zip(
                    names[len(first) :], _repeat(first, len(second)), second, strict=True
                )
            ]
            return Pairs(prompts, SCORE_KIND, self._score_layer)
        rule = embedding_rule(self.model, self.source.default_pooling)
        prompts = [
            await reader.read(name, text)
            for name, text in zip(names, [*first, *second], strict=True)
        ]
        count = len(first)
        return Pairs(prompts, rule.kind, lambda pooled: _cosines(pooled[:count], pooled[count:]))

    def _score_layer(self, pooled: Sequence[PooledPrompt]) -> list[float]:
        values = [float(one.vector[0]) for one in pooled]
        return [_sigmoid(value) for value in values] if self.use_activation else values


def _repeat(texts: Sequence[str], count: int) -> list[str]:
    return [*texts] * count if len(texts) == 1 else [*texts]


def _cosines(first: Sequence[PooledPrompt], second: Sequence[PooledPrompt]) -> list[float]:
    units = [unit_length(one.vector) for one in first]
    if len(units) == 1:
        units *= len(second)
    return [
        float(np.dot(unit, unit_length(other.vector)))
        for unit, other in zip(units, second, strict=True)
    ]


def _sigmoid(value: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * value))


@dataclass(frozen=True)
class RerankWriter:
    id: str
    model: str
    pairs: Pairs
    documents: Sequence[str]
    fields: RerankFields

    def write(self, pooled: Sequence[PooledPrompt]) -> bytes:
        scores = self.pairs.score(pooled)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [self._result(index, scores[index]) for index in order]
        return msgspec.json.encode(
            {
                "id": self.id,
                "model": self.model,
                "usage": _usage(pooled),
                "results": results[: self.fields.top_n or None],
            }
        )

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result = {"index": index, "relevance_score": score}
        if not self.fields.return_documents:
            return result
        return {**result, "document": {"text": self.documents[index]}}


@dataclass(frozen=True)
class ScoreWriter:
    id: str
    model: str
    pairs: Pairs

    def write(self, pooled: Sequence[PooledPrompt]) -> bytes:
        scores = self.pairs.score(pooled)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "list",
                "created": int(time.time()),
                "model": self.model,
                "data": data,
                "usage": _usage(pooled),
            }
        )


def _usage(pooled: Sequence[PooledPrompt]) -> dict[str, int]:
    tokens = sum(one.tokens for one in pooled)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
