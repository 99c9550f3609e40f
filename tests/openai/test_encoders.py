"""BERT, RoBERTa and XLM-RoBERTa behind /v1/embeddings and /v1/rerank, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from grpc_stack import running_coupled, text_inputs, token_inputs
from pooling_server import (
    MEAN,
    MODEL,
    PoolingServer,
    add_modules,
    pooling_server,
    save_pooling_model,
)
from tiny_hf_folder import BEGIN, END, POSITIONS, VOCABULARY, save_tokenizer
from tokenizers import Tokenizer, processors

from slipstream import LLM
from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine
from slipstream.weights.load import start_engine

CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
}
TEXTS = ["A rose.", "The sky is blue, as far as one can see. " * 6, "x"]
MODELS = {
    "bert-cls": ("BertModel", CLS, ("Normalize",)),
    "bert-mean": ("BertModel", MEAN, ()),
    "roberta-mean": ("RobertaModel", MEAN, ("Normalize",)),
    "xlm-roberta-cls": ("XLMRobertaModel", CLS, ()),
}


def save_encoder(folder: Path, architecture: str, **options: Any) -> None:
    """Save a random encoder, with a tokenizer that frames texts and pairs."""
    if architecture.startswith("Bert"):
        sizes = {**SIZES, "max_position_embeddings": POSITIONS, "pad_token_id": END}
    else:
        sizes = {
            **SIZES,
            "max_position_embeddings": POSITIONS + 2,
            "pad_token_id": 1,
            "type_vocab_size": 1,
        }
    config = getattr(hf, architecture).config_class(**{**sizes, **options})
    torch.manual_seed(11)
    model = getattr(hf, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", BEGIN), ("</s>", END)],
    )
    tokenizer.save(path)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def embedder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, PoolingServer]]:
    architecture, pooling, others = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_encoder(folder / "hf", architecture)
    add_modules(folder / "hf", pooling, *others)
    with pooling_server(folder, architecture) as server:
        yield request.param, server


def expected(name: str, server: PoolingServer, text: str) -> np.ndarray:
    tokens = server.tokenizer(text)["input_ids"]
    assert (tokens[0], tokens[-1]) == (BEGIN, END)
    # the ids of a text never are the padding's, by which RoBERTa counts positions
    ids = torch.tensor([tokens])
    offset = 0 if name.startswith("bert") else 2
    positions = torch.arange(offset, offset + len(tokens))[None]
    with torch.inference_mode():
        states = server.model(input_ids=ids, position_ids=positions).last_hidden_state[0].numpy()
    vector = states[0] if name.endswith("cls") else states.mean(axis=0)
    normalised = "Normalize" in MODELS[name][2]
    return vector / np.linalg.norm(vector) if normalised else vector


def test_embeddings_are_those_of_transformers(embedder):
    name, server = embedder
    answer = server.client.embeddings.create(model=MODEL, input=TEXTS)
    for one, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(one.embedding, expected(name, server, text), atol=2e-5)
    # computed beside no others, and again: no block of an earlier prompt is used
    (alone,) = server.client.embeddings.create(model=MODEL, input=TEXTS[1]).data
    np.testing.assert_allclose(alone.embedding, answer.data[1].embedding, atol=2e-6)
    assert not server.engine.info.reuse


def test_a_prompt_of_the_longest_length_is_one_step(embedder):
    name, server = embedder
    text = ("abcdefg " * 100)[: POSITIONS - 3]
    (one,) = server.client.embeddings.create(model=MODEL, input=text).data
    np.testing.assert_allclose(one.embedding, expected(name, server, text), atol=2e-5)


def test_an_encoder_does_not_generate(embedder):
    _, server = embedder
    status, _, message = server.problem("/v1/completions", {"model": MODEL, "prompt": "A"})
    assert status == 400
    assert "embeddings" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "deterministic: BertModel"),
        ({"attention_windows": (16,)}, "attention_windows: .* remove them"),
    ],
)
def test_options_that_need_causal_attention_are_refused(settings, message, tmp_path):
    save_encoder(tmp_path / "hf", "BertModel")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    with pytest.raises(ValueError, match=message):
        start_engine(folder, EngineSettings(dtype="float32", cache_tokens=4096, **settings))


@pytest.mark.parametrize("architecture", ["RobertaForSequenceClassification"])
def test_scores_of_pairs_are_those_of_transformers(architecture, tmp_path):
    save_encoder(tmp_path / "hf", architecture, num_labels=1)
    with pooling_server(tmp_path, architecture) as server:
        body = {"model": MODEL, "query": "What is red?", "documents": TEXTS}
        answer = server.post("/v1/rerank", {**body, "use_activation": False}).json()
        found = {result["index"]: result["relevance_score"] for result in answer["results"]}
        for index, text in enumerate(TEXTS):
            tokens = server.tokenizer("What is red?", text)["input_ids"]
            positions = torch.arange(2, 2 + len(tokens))[None]
            with torch.inference_mode():
                logits = server.model(torch.tensor([tokens]), position_ids=positions).logits
            assert found[index] == pytest.approx(float(logits[0, 0]), abs=2e-5)


def test_the_output_embeddings_of_triton_is_that_of_openai(embedder):
    _, server = embedder
    (openai,) = server.client.embeddings.create(model=MODEL, input=TEXTS[0]).data
    body = {"text_input": TEXTS[0], "max_tokens": 1}
    for model in (MODEL, "ensemble"):
        answer = server.post(f"/v2/models/{model}/generate", body).json()
        np.testing.assert_allclose(answer["embeddings"], openai.embedding, atol=2e-6)


async def test_the_output_embeddings_over_grpc(tmp_path):
    save_encoder(tmp_path / "hf", "BertModel")
    add_modules(tmp_path / "hf", MEAN, "Normalize")
    with pooling_server(tmp_path, "BertModel") as server:
        wanted = expected("bert-mean", server, TEXTS[0])
        wanted = wanted / np.linalg.norm(wanted)
        ids = server.tokenizer(TEXTS[0])["input_ids"]
    async with running_coupled(tmp_path / "engine", tmp_path / "grpc") as stack:
        for model in ("chat", "ensemble"):
            result = await stack.client.infer(model, text_inputs(TEXTS[0], 1, stream=False))
            np.testing.assert_allclose(result.as_numpy("embeddings"), [wanted], atol=2e-5)
        result = await stack.client.infer("tensorrt_llm", token_inputs(ids, 1, stream=False))
        np.testing.assert_allclose(result.as_numpy("embeddings"), [wanted], atol=2e-5)


def test_a_decoder_returns_an_embedding_on_request(tmp_path):
    save_pooling_model(tmp_path / "hf", "qwen2", "Qwen2ForCausalLM")
    body = {"text_input": TEXTS[0], "max_tokens": 3, "return_embeddings": True}
    parameters = {"embedding_pooling": "mean"}
    with pooling_server(tmp_path, "Qwen2ForCausalLM", parameters=parameters) as server:
        (openai,) = server.client.embeddings.create(model=MODEL, input=TEXTS[0]).data
        answer = server.post(f"/v2/models/{MODEL}/generate", body).json()
        np.testing.assert_allclose(answer["embeddings"], openai.embedding, atol=2e-6)
        assert np.linalg.norm(answer["embeddings"]) == pytest.approx(1.0, abs=1e-5)
        plain = server.post(f"/v2/models/{MODEL}/generate", {**body, "return_embeddings": False})
        assert "embeddings" not in plain.json()
        assert plain.json()["text_output"] != ""


def test_the_python_api_embeds_and_does_not_generate(tmp_path):
    save_encoder(tmp_path / "hf", "BertModel")
    add_modules(tmp_path / "hf", MEAN)
    with LLM(tmp_path / "hf", dtype="float32", cache_tokens=4096) as llm:
        with pooling_server(tmp_path, "BertModel") as server:
            wanted = expected("bert-mean", server, TEXTS[0])
        np.testing.assert_allclose(llm.embed(TEXTS[0])[0], wanted, atol=2e-5)
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=r"use embed\(\) or score\(\)"):
                call("abc")
        with pytest.raises(ValueError, match="no output layer"):
            llm.chat([{"role": "user", "content": "abc"}])


def test_embeddings_of_a_model_that_declares_none_are_refused(tmp_path):
    save_pooling_model(tmp_path / "hf", "qwen2", "Qwen2ForCausalLM")
    with pooling_server(tmp_path, "Qwen2ForCausalLM") as server:
        body = {"text_input": TEXTS[0], "max_tokens": 3, "return_embeddings": True}
        answer = server.post(f"/v2/models/{MODEL}/generate", body)
        assert answer.status_code == 400
        assert "does not declare how to compute embeddings" in answer.json()["error"]
