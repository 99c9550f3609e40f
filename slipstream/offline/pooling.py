"""Vectors and scores of texts, for models that pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.engine.sampling_params import EMBEDDING_KINDS
from slipstream.offline.sampling_params import Prompt, SamplingParams
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import EngineConfig

Vectors = npt.NDArray[np.float32]
_SCORE = "score"  # the kind of pooling through a score layer


class Pooling:
    """A model's pooling, and the requests that use it."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._declared = config.pooling
        self._labels = config.spec.labels
        self._tokenizer = tokenizer

    @property
    def scores_pairs(self) -> bool:
        """Return whether the model reads pairs of texts. Raises ValueError for a classifier."""
        if self._labels > 1:
            raise ValueError(
                f"the model is a classifier with {self._labels} labels: scores need a score layer "
                "with one label, or an embedding model"
            )
        return self._labels == 1

    def kind(self, wanted: str) -> str:
        """Return the kind of pooling of embeddings: the wanted or the declared one."""
        if self._labels:
            raise ValueError("the model is a classifier and has no embeddings; use score")
        declared = self._declared.kind if self._declared is not None else ""
        kind = wanted or declared
        if kind not in EMBEDDING_KINDS:
            reason = "" if wanted else ": the model declares none"
            raise ValueError(f"pooling must be one of {', '.join(EMBEDDING_KINDS)}{reason}")
        return kind

    def requests(
        self, prompts: Sequence[Prompt], kind: str, adapter: str | Path | None
    ) -> list[TextRequest]:
        """Return the requests for the embeddings of prompts."""
        return [_request(self._tokens(prompt), kind, adapter) for prompt in prompts]

    def pair_requests(
        self, queries: Sequence[str], documents: Sequence[str], adapter: str | Path | None
    ) -> list[TextRequest]:
        """Return the requests for the scores of pairs, for a model with a score layer."""
        start, between, end = self._tokenizer.pair_affixes
        encode = self._tokenizer.encode
        return [
            _request(
                [*start, *encode(query, False), *between, *encode(document, False), *end],
                _SCORE,
                adapter,
            )
            for query, document in zip(queries, documents, strict=True)
        ]

    def embeddings(self, vectors: Vectors) -> Vectors:
        """Return vectors with unit length, unless the model declares otherwise."""
        if self._declared is None or self._declared.normalize:
            return unit_length(vectors)
        return vectors

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, with the special tokens of embeddings around a text."""
        if not isinstance(prompt, str):
            return list(prompt)
        before, after = self._tokenizer.affixes
        return [*before, *self._tokenizer.encode(prompt, False), *after]


def _request(tokens: list[int], kind: str, adapter: str | Path | None) -> TextRequest:
    request = SamplingParams(max_tokens=1, ignore_end=True, adapter=adapter).request(tokens)
    return replace(request, sampling=replace(request.sampling, pooling=kind))


def unit_length(vectors: Vectors) -> Vectors:
    """Return each row with unit length."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return units


def cosines(queries: Vectors, documents: Vectors) -> list[float]:
    """Return the cosine of each document with its query, or with the only one."""
    products = unit_length(queries) * unit_length(documents)
    return [float(value) for value in products.sum(axis=1)]


def sigmoids(vectors: Vectors) -> list[float]:
    """Return the first number of each row, between 0 and 1."""
    return [float(value) for value in 0.5 * (1.0 + np.tanh(0.5 * vectors[:, 0].astype(np.float64)))]


def pair_texts(query: str | Sequence[str], documents: str | Sequence[str]) -> list[list[str]]:
    """Return the queries and the documents of pairs, as many of each."""
    first = [query] if isinstance(query, str) else list(query)
    second = [documents] if isinstance(documents, str) else list(documents)
    for name, texts in (("query", first), ("documents", second)):
        if not texts:
            raise ValueError(f"{name} must hold at least one text")
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"query must be one text, or as many as documents ({len(second)}), got {len(first)}"
        )
    return [first * len(second) if len(first) == 1 else first, second]
