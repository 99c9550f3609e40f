"""/v1/embeddings through OpenAI's SDK, against transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import numpy as np
import pytest
from pooling_server import (
    LAST,
    MEAN,
    MODEL,
    PoolingServer,
    add_modules,
    pooling_server,
    save_pooling_model,
)

TEXTS = ["Hello world", "A rose is red. " * 20, "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingServer]:
    """A model that declares pooling of the last token and unit length, as Qwen3-Embedding does."""
    folder = tmp_path_factory.mktemp("embeddings")
    save_pooling_model(folder / "hf", "qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True)
    add_modules(folder / "hf", LAST, "Normalize")
    # the text ends with the end token, as in Qwen3-Embedding
    path = folder / "hf" / "tokenizer.json"
    document = json.loads(path.read_text())
    document["post_processor"]["single"] = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    tokens = document["post_processor"]["special_tokens"]
    tokens["</s>"] = {"id": "</s>", "ids": [tokens["<s>"]["ids"][0] + 1], "tokens": ["</s>"]}
    path.write_text(json.dumps(document))
    with pooling_server(folder, "Qwen3ForCausalLM") as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingServer]:
    """A bare model that declares the mean of all tokens, of any length."""
    folder = tmp_path_factory.mktemp("bare")
    save_pooling_model(folder / "hf", "mistral", "MistralModel", sliding_window=None)
    add_modules(folder / "hf", MEAN)
    path = folder / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_eos_token": True}))
    with pooling_server(folder, "MistralModel") as server:
        yield server


def last_states(server: PoolingServer, tokens: list[int]) -> np.ndarray:
    state = server.states(tokens)[-1].numpy()
    return state / np.linalg.norm(state)


def test_embeddings_of_texts_equal_those_of_transformers(server):
    answer = server.client.embeddings.create(model=MODEL, input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.object == "list"
    prompts = [server.tokenizer(text)["input_ids"] for text in TEXTS]
    assert prompts[0][-1] == server.tokenizer.eos_token_id
    for one, prompt in zip(answer.data, prompts, strict=True):
        assert one.object == "embedding"
        np.testing.assert_allclose(one.embedding, last_states(server, prompt), atol=1e-5)
    count = sum(map(len, prompts))
    assert answer.usage.model_dump() == {"prompt_tokens": count, "total_tokens": count}
    assert answer.model == MODEL


def test_the_mean_of_a_bare_model_equals_that_of_transformers(bare):
    answer = bare.client.embeddings.create(model=MODEL, input=TEXTS)
    for one, text in zip(answer.data, TEXTS, strict=True):
        tokens = [*bare.tokenizer(text)["input_ids"]]
        if tokens[-1] != bare.tokenizer.eos_token_id:
            tokens.append(bare.tokenizer.eos_token_id)  # add_eos_token
        expected = bare.states(tokens).mean(dim=0).numpy()
        np.testing.assert_allclose(one.embedding, expected, atol=1e-5)
        assert abs(np.linalg.norm(expected) - 1) > 0.1  # not normalised


def test_token_ids_are_used_unchanged(server):
    tokens = [[5, 6, 7], [8]]
    answer = server.client.embeddings.create(model=MODEL, input=tokens)
    for one, prompt in zip(answer.data, tokens, strict=True):
        np.testing.assert_allclose(one.embedding, last_states(server, prompt), atol=1e-5)
    single = server.client.embeddings.create(model=MODEL, input=[5, 6, 7])
    np.testing.assert_allclose(single.data[0].embedding, answer.data[0].embedding, atol=1e-6)


def test_base64_holds_the_same_numbers_as_floats(server):
    call = {"model": MODEL, "input": "Hello"}
    floats = server.post("/v1/embeddings", call).json()["data"][0]["embedding"]
    text = server.post("/v1/embeddings", {**call, "encoding_format": "base64"}).json()
    packed = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(packed, np.array(floats, dtype=np.float32))
    assert np.linalg.norm(packed) == pytest.approx(1)


def test_fewer_dimensions_have_unit_length_again(server):
    whole = server.client.embeddings.create(model=MODEL, input="Hello").data[0].embedding
    few = server.client.embeddings.create(model=MODEL, input="Hello", dimensions=8)
    cut = np.array(whole[:8])
    np.testing.assert_allclose(few.data[0].embedding, cut / np.linalg.norm(cut), atol=1e-6)


def test_truncation_keeps_the_first_tokens_and_the_special_ones(server):
    text = "A rose is red. " * 200
    call = {"model": MODEL, "input": text}
    status, param, message = server.problem("/v1/embeddings", call)
    assert (status, param) == (400, "input")
    assert "tokens, and this model takes at most" in message
    for limit, count in ((20, 20), (-1, 511)):
        expected = server.tokenizer(text, truncation=True, max_length=count)["input_ids"]
        answer = server.client.embeddings.create(
            **call, extra_body={"truncate_prompt_tokens": limit}
        )
        assert answer.usage.prompt_tokens == count
        np.testing.assert_allclose(
            answer.data[0].embedding, last_states(server, expected), atol=1e-5
        )


def test_many_inputs_come_back_in_order(server):
    texts = [f"number {number}" for number in range(100)]
    answer = server.client.embeddings.create(model=MODEL, input=texts)
    for index in (0, 57, 99):
        alone = server.client.embeddings.create(model=MODEL, input=texts[index])
        np.testing.assert_allclose(answer.data[index].embedding, alone.data[0].embedding, atol=1e-5)


def test_a_model_that_generates_still_does(server):
    answer = server.client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
    assert answer.usage.completion_tokens <= 3


def test_a_bare_model_does_not_generate(bare):
    status, _, message = bare.problem("/v1/completions", {"model": MODEL, "prompt": "Hello"})
    assert status == 400
    assert "has no output layer for tokens" in message
    # Triton's routes return the only thing that it computes, if it is known how
    answer = bare.post(f"/v2/models/{MODEL}/generate", {"text_input": "a", "max_tokens": 1})
    assert answer.status_code == 200
    (same,) = bare.client.embeddings.create(model=MODEL, input="a").data
    np.testing.assert_allclose(answer.json()["embeddings"], same.embedding, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "must be a string, a list of token ids"),
        ({"input": 7}, "input", "must be a string, a list of token ids"),
        ({"input": [["a"]]}, "input[0]", "must be a string or a list of token ids"),
        ({"input": ["a", None]}, "input[1]", "must be a string or a list of token ids"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 texts, got 2049"),
        ({"input": ["a", [9999]]}, "input[1]", "token id 9999"),
        ({"input": "a", "dimensions": 65}, "dimensions", "between 1 and 64, got 65"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be >= 1"),
    ],
)
def test_an_error_names_the_field(server, body, param, text):
    status, name, message = server.problem("/v1/embeddings", body)
    assert (status, name) == (400, param)
    assert text in message


def test_unknown_fields_are_listed(server):
    answer = server.post("/v1/embeddings", {"input": "a", "colour": "red"})
    assert answer.headers["x-slipstream-ignored-fields"] == "colour"


# -- models that declare nothing


def test_a_chat_model_says_how_to_get_embeddings(tmp_path):
    save_pooling_model(tmp_path / "hf", "llama", "LlamaForCausalLM")
    with pooling_server(tmp_path, "LlamaForCausalLM") as server:
        status, param, message = server.problem("/v1/embeddings", {"input": "a"})
    assert (status, param) == (400, "model")
    assert "--embeddings last" in message
    assert "embedding_pooling" in message


@pytest.mark.parametrize("way", ["option", "config.pbtxt"])
def test_any_model_has_embeddings_on_request(tmp_path, way):
    save_pooling_model(tmp_path / "hf", "llama", "LlamaForCausalLM")
    option = "mean" if way == "option" else ""
    with pooling_server(
        tmp_path,
        "LlamaForCausalLM",
        embedding_pooling=option,
        parameters={} if option else {"embedding_pooling": "mean"},
    ) as server:
        found = server.client.embeddings.create(model=MODEL, input="Hello").data[0].embedding
        state = server.states(server.tokenizer("Hello")["input_ids"]).mean(dim=0).numpy()
    np.testing.assert_allclose(found, state / np.linalg.norm(state), atol=1e-5)


def test_a_module_that_is_not_supported_is_named(tmp_path):
    save_pooling_model(tmp_path / "hf", "llama", "LlamaForCausalLM")
    add_modules(tmp_path / "hf", MEAN, "Dense")
    with pooling_server(tmp_path, "LlamaForCausalLM") as server:
        _, _, message = server.problem("/v1/embeddings", {"input": "a"})
    assert "its module Dense of modules.json is not supported" in message


def test_an_unknown_pooling_in_the_configuration_is_a_problem(tmp_path):
    save_pooling_model(tmp_path / "hf", "llama", "LlamaForCausalLM")
    with pytest.raises(Exception, match="must be one of last, mean, weightedmean, cls, got 'max'"):
        with pooling_server(tmp_path, "LlamaForCausalLM", parameters={"embedding_pooling": "max"}):
            pass
