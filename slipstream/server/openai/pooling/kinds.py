"""The kind of pooling of a model, with the errors of OpenAI's routes."""

from __future__ import annotations

from slipstream.server.models import embeddings
from slipstream.server.models.embeddings import EmbeddingRule, NoEmbeddings
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.models import OpenAIModel


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
    try:
        return embeddings.embedding_rule(model.text.engine.model, default)
    except NoEmbeddings as problem:
        raise ApiError(f"The model '{model.id}' {problem}", "model") from problem
