"""How a model pools: what its source declares, unless the server's options say otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.models import OpenAIModel


@dataclass(frozen=True)
class EmbeddingRule:
    kind: str  # of pooling
    normalize: bool  # whether embeddings have unit length


def scores_pairs(model: OpenAIModel) -> bool:
    """Return whether the model has a score layer for pairs of texts."""
    labels = model.text.engine.model.engine_config.spec.labels
    if labels > 1:
        raise ApiError(
            f"The model '{model.id}' is a classifier with {labels} labels. Scores need a score "
            "layer with one label, or an embedding model",
            "model",
        )
    return labels == 1


def embedding_rule(model: OpenAIModel, default: str) -> EmbeddingRule:
    """Return how the model computes embeddings.

    `default`: the kind of the server's option, which goes before the model's own. Raises ApiError
    for a model without embeddings.
    """
    engine = model.text.engine.model
    declared = engine.engine_config.pooling
    if engine.engine_config.spec.labels:
        raise ApiError(
            f"The model '{model.id}' is a classifier and has no embeddings. "
            "Use /v1/rerank or /score",
            "model",
        )
    configured = default or engine.embedding_pooling
    if configured:
        return EmbeddingRule(configured, declared is None or declared.normalize)
    if declared is None or not declared.kind:
        reason = declared.problem if declared is not None else ""
        raise ApiError(
            f"The model '{model.id}' does not declare how to compute embeddings"
            f"{': ' + reason if reason else ''}. "
            "Start the server with --embeddings last (or mean), "
            "or set the parameter embedding_pooling in the config.pbtxt of its engine",
            "model",
        )
    return EmbeddingRule(declared.kind, declared.normalize)
