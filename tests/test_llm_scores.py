"""LLM.score and LLM.embed give the answers of the server's routes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pooling_server import (
    LAST,
    PoolingServer,
    add_modules,
    pooling_server,
    save_pooling_model,
)

from slipstream import LLM

QUERY = "What is red?"
DOCUMENTS = ["A rose.", "The sky is blue.", "Nothing at all, really. " * 8]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PoolingServer, LLM]]:
    folder = tmp_path_factory.mktemp("embedder")
    save_pooling_model(folder / "hf", "qwen2", "Qwen2ForCausalLM")
    add_modules(folder / "hf", LAST)
    with pooling_server(folder, "Qwen2ForCausalLM") as server:
        with LLM(folder / "engine", "float32", cache_tokens=2048) as llm:
            yield server, llm


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PoolingServer, LLM]]:
    folder = tmp_path_factory.mktemp("classifier")
    name = "Qwen3ForSequenceClassification"
    save_pooling_model(folder / "hf", "qwen3", name, num_labels=1)
    with pooling_server(folder, name) as server:
        with LLM(folder / "engine", "float32", cache_tokens=2048) as llm:
            yield server, llm


def scores(server: PoolingServer, **body: object) -> list[float]:
    data = server.post("/score", body).json()["data"]
    return [one["score"] for one in data]


def test_scores_of_an_embedding_model_equal_the_route(
    embedder: tuple[PoolingServer, LLM],
) -> None:
    server, llm = embedder
    found = llm.score(QUERY, DOCUMENTS)
    assert found == pytest.approx(scores(server, text_1=QUERY, text_2=DOCUMENTS), abs=1e-5)
    assert len(set(found)) == 3
    pairs = llm.score([QUERY, "Blue?", QUERY], DOCUMENTS)
    expected = scores(server, text_1=[QUERY, "Blue?", QUERY], text_2=DOCUMENTS)
    assert pairs == pytest.approx(expected, abs=1e-5)
    assert llm.score(QUERY, DOCUMENTS[0]) == pytest.approx(found[:1], abs=1e-5)


def test_scores_of_a_score_layer_equal_the_route(classifier: tuple[PoolingServer, LLM]) -> None:
    server, llm = classifier
    for use_activation in (True, False):
        found = llm.score(QUERY, DOCUMENTS, use_activation=use_activation)
        body = {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": use_activation}
        assert found == pytest.approx(scores(server, **body), abs=1e-5)
    with pytest.raises(ValueError, match="the model is a classifier and has no embeddings"):
        llm.embed(QUERY)


def test_embeddings_equal_the_route(embedder: tuple[PoolingServer, LLM]) -> None:
    server, llm = embedder
    found = llm.embed(DOCUMENTS)
    body = {"model": "pooler", "input": DOCUMENTS}
    expected = [one["embedding"] for one in server.post("/v1/embeddings", body).json()["data"]]
    assert np.allclose(found, np.array(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("query", "documents", "message"),
    [
        (["a", "b"], DOCUMENTS, r"query must be one text, or as many as documents \(3\), got 2"),
        ([], DOCUMENTS, "query must hold at least one text"),
        (QUERY, [], "documents must hold at least one text"),
    ],
)
def test_texts_without_a_partner_are_refused(
    embedder: tuple[PoolingServer, LLM], query: list[str], documents: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        embedder[1].score(query, documents)
