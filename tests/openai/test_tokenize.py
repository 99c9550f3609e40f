"""/tokenize and /detokenize in vLLM's and llama-server's formats, against transformers' tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai_server import Serving

from slipstream.server.openai import tokenize

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
]
TEXTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def reference(serving: Serving) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(serving.model_folder)


def call(serving: Serving, path: str, body: Any) -> Any:
    answer = httpx.post(f"http://127.0.0.1:{serving.port}{path}", json=body, trust_env=False)
    return answer.json() if answer.status_code == 200 else answer


def problem(serving: Serving, path: str, body: Any) -> tuple[int, str, str]:
    answer = call(serving, path, body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_a_prompt_is_tokenized_as_transformers_does(serving, reference):
    text = "Hello <s> world </s>!\n"
    expected = reference(text)["input_ids"]
    found = call(serving, "/tokenize", {"model": "chat", "prompt": text})
    info = serving.engine.info
    assert found == {
        "count": len(expected),
        "max_model_len": info.max_sequence_tokens,
        "tokens": expected,
        "token_strs": None,
    }
    plain = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    found = call(serving, "/tokenize", plain)
    tokens = reference(text, add_special_tokens=False)["input_ids"]
    assert found["tokens"] == tokens
    assert found["token_strs"] == reference.convert_ids_to_tokens(tokens)
    assert call(serving, "/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []


@pytest.mark.parametrize("generation", [True, False])
def test_messages_are_rendered_by_the_chat_template(serving, reference, generation):
    expected = reference.apply_chat_template(
        TEXTS, add_generation_prompt=generation, quietly="yes", tokenize=False
    )
    found = call(
        serving,
        "/tokenize",
        {
            "model": "chat",
            "messages": MESSAGES,
            "add_generation_prompt": generation,
            "chat_template_kwargs": {"quietly": "yes"},
        },
    )
    assert found["tokens"] == reference(expected, add_special_tokens=False)["input_ids"]


def test_the_last_message_is_continued(serving, reference):
    messages = [*TEXTS, {"role": "assistant", "content": "I am"}]
    expected = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    found = call(serving, "/tokenize", {"messages": messages, "continue_final_message": True})
    assert found["tokens"] == reference(expected, add_special_tokens=False)["input_ids"]


def test_the_count_of_messages_is_the_usage_of_a_chat_completion(serving):
    answer = serving.client.chat.completions.create(model="chat", messages=TEXTS, max_tokens=1)
    found = call(serving, "/tokenize", {"model": "chat", "messages": MESSAGES})
    assert found["count"] == answer.usage.prompt_tokens


def test_llama_servers_format_has_tokens_only(serving, reference):
    text = "Grüße"
    tokens = reference(text, add_special_tokens=False)["input_ids"]
    assert call(serving, "/tokenize", {"content": text}) == {"tokens": tokens}
    with_bos = call(serving, "/tokenize", {"content": text, "add_special": True})
    assert with_bos == {"tokens": reference(text)["input_ids"]}
    pieces = call(serving, "/tokenize", {"content": "Hi<s>", "with_pieces": True})["tokens"]
    assert [piece["piece"] for piece in pieces] == ["H", "i", "<s>"]


def test_long_lists_of_tokens_are_written_in_parts(serving, monkeypatch):
    text = "Hello, who are you?"
    bodies = [
        {"prompt": text, "return_token_strs": True},
        {"prompt": text},
        {"content": text, "with_pieces": True},
        {"content": ""},
    ]
    whole = [call(serving, "/tokenize", body) for body in bodies]
    monkeypatch.setattr(tokenize, "_WRITTEN_AT_ONCE", 2)
    assert [call(serving, "/tokenize", body) for body in bodies] == whole
    assert whole[0]["count"] == len(whole[0]["tokens"]) == len(whole[0]["token_strs"]) > 4
    assert whole[1] == {**whole[0], "token_strs": None}
    assert whole[3] == {"tokens": []}


def test_detokenize_returns_the_text_with_special_tokens(serving, reference):
    tokens = reference("Hello world")["input_ids"]
    expected = "<s>Hello world"
    found = call(serving, "/detokenize", {"model": "chat", "tokens": tokens})
    assert found == {"prompt": expected, "content": expected}
    assert call(serving, "/detokenize", {"tokens": []}) == {"prompt": "", "content": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"),
    [
        ("/tokenize", {}, 400, "prompt", "prompt, messages or content is required"),
        ("/tokenize", {"prompt": "a", "content": "b"}, 400, "content", "combined with prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "expected `str`"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model", "does not exist"),
        ("/tokenize", {"prompt": "a" * 200_000}, 400, "prompt", "at most 511"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least one message"),
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special", "true"),
        ("/detokenize", {}, 400, "tokens", "tokens is required"),
        ("/detokenize", {"tokens": [98_000]}, 400, "tokens", "token id 98000"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token id -1"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "expected `array"),
    ],
)
def test_an_error_names_the_field(serving, path, body, status, param, text):
    found = problem(serving, path, body)
    assert found[:2] == (status, param)
    assert text in found[2]


def test_only_post_is_allowed(serving):
    answer = httpx.get(f"http://127.0.0.1:{serving.port}/tokenize", trust_env=False)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        405,
        "GET is not allowed here, POST is",
    )
