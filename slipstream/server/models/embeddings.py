"""Embeddings: how a model pools prompts, and requests for the output `embeddings`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.models import EngineModel
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EmbeddingRule:
    kind: str  # of pooling
    normalize: bool  # whether embeddings have unit length


class NoEmbeddings(ValueError):
    """The reason why a model has no embeddings: the rest of a sentence that begins with the model's
    name.
    """


def embedding_rule(engine: EngineModel, default: str = "") -> EmbeddingRule:
    """Return how a model computes embeddings, or raise NoEmbeddings.

    `default`: the kind of the server's option, which goes before the model's own.
    """
    declared = engine.engine_config.pooling
    if engine.engine_config.spec.labels:
        raise NoEmbeddings("is a classifier and has no embeddings. Use /v1/rerank or /score")
    configured = default or engine.embedding_pooling
    if configured:
        return EmbeddingRule(configured, declared is None or declared.normalize)
    if declared is None or not declared.kind:
        reason = declared.problem if declared is not None else ""
        raise NoEmbeddings(
            f"does not declare how to compute embeddings{': ' + reason if reason else ''}. "
            "Start the server with --embeddings last (or mean), "
            "or set the parameter embedding_pooling in the config.pbtxt of its engine"
        )
    return EmbeddingRule(declared.kind, declared.normalize)


def unit_length(vector: np.ndarray) -> np.ndarray:
    """Return the vector divided by its length; a vector of zeros is unchanged."""
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


async def pooled_request(
    request: TextRequest, rule: EmbeddingRule, tokenizer: Tokenizer
) -> TextRequest:
    """Return the request for a prompt's embedding in place of its answer. A text gets the special
    tokens of texts that are pooled.
    """
    sampling = SamplingParams(max_tokens=1, pooling=rule.kind, timing=request.sampling.timing)
    prompt = request.prompt
    if isinstance(prompt, str):
        before, after = tokenizer.affixes
        tokens = await in_thread_if_long(len(prompt), tokenizer.encode, prompt, False)
        prompt = [*before, *tokens, *after]
    return replace(
        request,
        prompt=prompt,
        sampling=sampling,
        sequences=1,
        ignore_end=True,
        bad_words=[],
        stop_words=[],
    )
