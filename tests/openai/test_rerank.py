"""/v1/rerank and /score with an embedding model and with a classifier, against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pooling_server import (
    LAST,
    MODEL,
    PoolingServer,
    add_modules,
    pooling_server,
    save_pooling_model,
)

QUERY = "What is red?"
DOCUMENTS = ["A rose.", "The sky is blue.", "Nothing at all, really. " * 8]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingServer]:
    folder = tmp_path_factory.mktemp("embedder")
    save_pooling_model(folder / "hf", "qwen2", "Qwen2ForCausalLM")
    add_modules(folder / "hf", LAST)
    with pooling_server(folder, "Qwen2ForCausalLM") as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingServer]:
    folder = tmp_path_factory.mktemp("classifier")
    name = "Qwen3ForSequenceClassification"
    save_pooling_model(folder / "hf", "qwen3", name, num_labels=1)
    with pooling_server(folder, name) as server:
        yield server


def cosines(server: PoolingServer, query: str, documents: list[str]) -> list[float]:
    states = [
        server.states(server.tokenizer(text)["input_ids"])[-1].numpy()
        for text in (query, *documents)
    ]
    units = [state / np.linalg.norm(state) for state in states]
    return [float(np.dot(units[0], unit)) for unit in units[1:]]


def logits(server: PoolingServer, query: str, documents: list[str]) -> list[float]:
    found = []
    for document in documents:
        pair = server.tokenizer(query, document, return_tensors="pt")
        with torch.inference_mode():
            found.append(float(server.model(input_ids=pair["input_ids"]).logits[0, 0]))
    return found


def sigmoids(values: list[float]) -> list[float]:
    return torch.tensor(values).sigmoid().tolist()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_the_cosine_of_embeddings(embedder, path):
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
    answer = embedder.post(path, body).json()
    expected = cosines(embedder, QUERY, DOCUMENTS)
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    counts = [len(embedder.tokenizer(text)["input_ids"]) for text in (QUERY, *DOCUMENTS)]
    assert answer["usage"]["total_tokens"] == sum(counts)
    assert answer["model"] == MODEL
    assert answer["id"].startswith("rerank-")


def test_top_n_and_return_documents(embedder):
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}
    whole = embedder.post("/v1/rerank", body).json()["results"]
    assert len(whole) == 3
    few = embedder.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False}).json()
    assert [sorted(result) for result in few["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in few["results"]] == [one["index"] for one in whole[:2]]
    for count in (0, 9):
        assert len(embedder.post("/v1/rerank", {**body, "top_n": count}).json()["results"]) == 3


def test_a_classifier_scores_pairs_as_transformers_does(classifier):
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
    results = classifier.post("/v1/rerank", body).json()["results"]
    raw = logits(classifier, QUERY, DOCUMENTS)
    expected = sigmoids(raw)
    assert len(set(expected)) == 3
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
    plain = classifier.post("/v1/rerank", {**body, "use_activation": False}).json()["results"]
    for result in plain:
        assert result["relevance_score"] == pytest.approx(raw[result["index"]], abs=1e-5)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_pairs_one_text_with_many_or_each_with_its_own(classifier, path):
    answer = classifier.post(path, {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS}).json()
    expected = sigmoids(logits(classifier, QUERY, DOCUMENTS))
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert {one["object"] for one in answer["data"]} == {"score"}
    pairs = {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:]}
    answer = classifier.post(path, pairs).json()
    expected = sigmoids(
        [logits(classifier, one, [other])[0] for one, other in itertools.pairwise(DOCUMENTS)]
    )
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_score_of_an_embedding_model_is_the_cosine(embedder):
    answer = embedder.post("/score", {"text_1": QUERY, "text_2": [*DOCUMENTS, QUERY]}).json()
    expected = [*cosines(embedder, QUERY, DOCUMENTS), 1.0]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_truncation_cuts_the_document(classifier):
    body = {"text_1": QUERY, "text_2": "A rose. " * 400}
    assert classifier.problem("/score", body)[:2] == (400, "text_2[0]")
    answer = classifier.post("/score", {**body, "truncate_prompt_tokens": 40}).json()
    assert answer["usage"]["prompt_tokens"] == 40
    pair = classifier.tokenizer(
        QUERY, body["text_2"], truncation="only_second", max_length=40, return_tensors="pt"
    )
    with torch.inference_mode():
        expected = float(classifier.model(input_ids=pair["input_ids"]).logits[0, 0].sigmoid())
    assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "query is required"),
        ("/v1/rerank", {"query": "a"}, "documents", "documents is required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "at least one document"),
        ("/v1/rerank", {"query": "a", "documents": [{}]}, "documents[0]", "object with a text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/score", {"text_1": "a"}, "text_2", "text_2 is required"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "at least one text"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "must hold one text"),
        ("/v1/embeddings", {"input": "a"}, "model", "Use /v1/rerank or /score"),
    ],
)
def test_an_error_names_the_field(classifier, path, body, param, text):
    status, name, message = classifier.problem(path, body)
    assert (status, name) == (400, param)
    assert text in message


def test_a_classifier_with_several_labels_does_not_score(tmp_path):
    name = "LlamaForSequenceClassification"
    save_pooling_model(tmp_path / "hf", "llama", name, num_labels=3)
    with pooling_server(tmp_path, name) as server:
        status, param, message = server.problem("/score", {"text_1": "a", "text_2": "b"})
    assert (status, param) == (400, "model")
    assert "a classifier with 3 labels" in message
