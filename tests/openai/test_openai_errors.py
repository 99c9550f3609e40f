"""Wrong requests are errors in OpenAI's format; unknown fields are ignored and listed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_support import get, post

from slipstream.server.openai.fields import ChatFields, CompletionFields

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
CALLS: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "chat", "messages": MESSAGES, "max_tokens": 2},
    "completions": {"model": "chat", "prompt": "Say: ", "max_tokens": 2},
}
BOTH = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**300}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"presence_penalty": 101}, "presence_penalty"),
    ({"frequency_penalty": -101}, "frequency_penalty"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"98": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e5}}, "logit_bias"),
    ({"stream": 1}, "stream"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"model": None}, "model"),
    ({"user": 5}, "user"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "a" * 65}, "request_id"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"prompt_logprobs": -1, "stream": False}, "prompt_logprobs"),
    ({"prompt_logprobs": 101, "stream": False}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [98]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"structural_tag": "{"}},
        "structured_outputs.structural_tag",
    ),
    (
        {"structured_outputs": {"json_object": True}, "guided_regex": "a"},
        "structured_outputs.json_object",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "<a>"}]}},
        "response_format.structures[0]",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
            }
        },
        "response_format.triggers",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        "response_format.format",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]
CHAT = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"documents": [{"text": 5}]}, "documents[0][...]"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"verbosity": "low"}, "verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
        "response_format",
    ),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
]
COMPLETIONS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 129, "stream": False}, "best_of"),
    ({"prompt": ["a"] * 65, "best_of": 2, "stream": False}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 101}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": ["a", [1], 2]}, "prompt[2]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"prompt": [98]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"prompt": "a" * 200_000}, "prompt"),
]


def ask(serving, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = post(serving.port, f"/v1/{path}", json.dumps({**CALLS[path], **fields}).encode())
    assert answer.header("content-type") == "application/json"
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(("chat/completions", *case) for case in (*BOTH, *CHAT)),
        *(("completions", *case) for case in (*BOTH, *COMPLETIONS)),
    ],
)
def test_a_wrong_field_is_an_error_with_its_name(serving, path, fields, param):
    for more in ({}, {"stream": True}) if not {"stream", "stream_options"} & set(fields) else ({},):
        status, document = ask(serving, path, {**fields, **more})
        error = document["error"]
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert param in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "store": False,
            "metadata": {},
            "service_tier": "auto",
            "modalities": ["text"],
            "suffix": "",
            "stop": None,
            "n": None,
            "temperature": None,
        },
        {
            "user": "me",
            "safety_identifier": "me",
            "prompt_cache_key": "mine",
            "stop": [""],
            "stop_words": None,
        },
        {
            "temperature": 0,
            "top_p": 0,
            "n": 1,
            "seed": 2**64 - 1,
            "stop": ["a" * 1024] * 64,
            "logit_bias": {"97": -1e4},
            "presence_penalty": -100,
            "frequency_penalty": 100,
            "max_tokens": 2**31 - 1,
        },
    ],
)
def test_no_op_values_and_values_at_the_bounds_are_accepted(serving, fields):
    for path in CALLS:
        fields = {**fields, "max_tokens": fields.get("max_tokens", 2)}
        body = json.dumps({**CALLS[path], **fields}).encode()
        answer = post(serving.port, f"/v1/{path}", body)
        assert answer.status == 200, answer.body
        assert answer.header("x-slipstream-ignored-fields") is None


@pytest.mark.parametrize(
    ("path", "belongs", "fields"),
    [
        (
            "completions",
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "reasoning_effort": "high",
                "continue_final_message": True,
                "add_generation_prompt": False,
                "documents": [{"text": "a"}],
                "tools": [{"type": "function"}],
                "tool_choice": "required",
                "parallel_tool_calls": True,
                "max_completion_tokens": 3,
                "top_logprobs": 0,
            },
        ),
        ("chat/completions", "/v1/completions", {"prompt": "Say: ", "echo": True, "best_of": 1}),
    ],
)
def test_fields_of_the_other_endpoint_are_rejected(serving, path, belongs, fields):
    for name, value in fields.items():
        status, document = ask(serving, path, {name: value})
        assert (status, document["error"]["param"]) == (400, name)
        assert (
            f"{name} is not supported by /v1/{path}: it belongs to {belongs}"
            == document["error"]["message"]
        )
    answer = post(
        serving.port, f"/v1/{path}", json.dumps({**CALLS[path], **dict.fromkeys(fields)}).encode()
    )
    assert (answer.status, answer.header("x-slipstream-ignored-fields")) == (200, None)


@pytest.mark.parametrize("path", CALLS)
def test_unsupported_openai_fields_are_rejected_by_both_endpoints(serving, path):
    for name, value in {"suffix": "end", "prompt_cache_retention": "24h"}.items():
        status, document = ask(serving, path, {name: value})
        assert (status, document["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_listed_in_a_header(serving, stream):
    client = serving.client.chat.completions.with_raw_response
    raw = client.create(
        model="chat",
        messages=[{**MESSAGES[0], "mood": "good"}],
        max_tokens=2,
        stream=stream,
        extra_body={"mirostat": 4, "we\r\nird: 1": 2, "nothing": None},
    )
    assert raw.headers["x-slipstream-ignored-fields"] == "mirostat, we??ird??1, messages[0].mood"
    raw = client.create(
        model="chat", messages=MESSAGES, max_tokens=2, stream=True, stream_options={"speed": 2}
    )
    assert raw.headers["x-slipstream-ignored-fields"] == "stream_options.speed"
    raw = client.create(model="chat", messages=MESSAGES, max_tokens=2)
    assert "x-slipstream-ignored-fields" not in raw.headers


VALUES = (
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63),
    10**80,
    1.5,
    1e308,
    True,
    None,
    "",
    "5",
    "x" * 2000,
    [],
    [1, [2]],
    {},
    {"type": []},
    [[]],
    [None],
    [{}],
)


@pytest.mark.parametrize(
    ("path", "kind"), [("chat/completions", ChatFields), ("completions", CompletionFields)]
)
def test_any_value_of_a_field_is_answered_or_an_error_with_its_name(serving, path, kind):
    seen = set()
    for name in kind.__struct_fields__:
        for value in VALUES:
            answer = post(
                serving.port, f"/v1/{path}", json.dumps({**CALLS[path], name: value}).encode()
            )
            seen.add(answer.status)
            if answer.status != 200:
                error = json.loads(answer.body)["error"]
                assert answer.status in ((400, 404) if name == "model" else (400,)), (
                    name,
                    value,
                    answer.body,
                )
                assert error["param"].startswith(
                    (name, "max_tokens" if name == "max_completion_tokens" else name)
                )
    assert seen == {200, 400, 404}


def test_unknown_models_are_not_found(serving):
    for call in (
        lambda: serving.client.models.retrieve("gpt-4"),
        lambda: serving.client.chat.completions.create(model="gpt-4", messages=MESSAGES),
        lambda: serving.client.completions.create(model="gpt-4", prompt="a", stream=True),
        # folder without an adapter
        lambda: serving.client.completions.create(model="notes", prompt="a"),
        lambda: serving.client.completions.create(model="../adapters/french", prompt="a"),
        lambda: serving.client.completions.create(model="", prompt="a"),
        # longer than a folder name may be
        lambda: serving.client.completions.create(model="é" * 200, prompt="a"),
        # a model of token ids
        lambda: serving.client.completions.create(model="tensorrt_llm", prompt="a"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
        assert "Known: chat, french" in raised.value.message


def test_a_too_long_prompt_has_the_code_context_length_exceeded(serving):
    with pytest.raises(openai.BadRequestError) as raised:
        serving.client.completions.create(model="chat", prompt=[5] * 512)
    assert raised.value.code == "context_length_exceeded"
    assert "512" in raised.value.message
    assert "511" in raised.value.message
    assert (
        serving.client.completions.create(model="chat", prompt=[5] * 511).usage.completion_tokens
        == 1
    )


def test_a_model_without_a_chat_template_says_how_to_give_one(serving, monkeypatch):
    monkeypatch.setattr(serving.generator.tokenizer, "chat_templates", {})
    with pytest.raises(openai.BadRequestError, match=r"chat_template\.jinja") as raised:
        serving.client.chat.completions.create(model="chat", messages=MESSAGES)
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"[" * 10_000, b'{"model": "\xff"}', b'{"temperature": 1e999}']
)
def test_a_body_that_is_not_a_json_object_is_rejected(serving, body):
    for path in CALLS:
        answer = post(serving.port, f"/v1/{path}", body)
        assert answer.status == 400
        assert "JSON" in json.loads(answer.body)["error"]["message"]


def test_unknown_paths_and_methods_are_rejected(serving):
    assert get(serving.port, "/v1/completions").status == 405
    assert post(serving.port, "/v1/models", b"").status == 405
    for path in ("/v1/unknown", "/v1/", "/v1/models/"):
        answer = get(serving.port, path)
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["type"]) == (404, "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        serving.client.images.generate(model="chat", prompt="a")
