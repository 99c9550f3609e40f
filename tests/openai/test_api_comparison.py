"""The page that compares the API with other servers says what this server does."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest
from source_tree import ROOT

from slipstream.server.openai.fields import (
    _UNSUPPORTED,
    ChatFields,
    CompletionFields,
    StreamOptions,
)

PAGE = (ROOT / "docs" / "api-comparison.md").read_text("utf-8")
WORDS = {"yes", "no effect", "refused", "ignored", "no"}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TAGGED = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
# A value for each field that is more than its default.
VALUES: dict[str, Any] = {
    "model": "ensemble",
    "temperature": 0.5,
    "top_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "max_tokens": 2,
    "n": 2,
    "stop": ["x"],
    "seed": 5,
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stream_options.include_usage": True,
    "stream_options.continuous_usage_stats": True,
    "stream_options.include_obfuscation": True,
    "response_format": {"type": "structural_tag", "structures": [TAGGED], "triggers": ["<a>"]},
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "key",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
    "suffix": "end",
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "bad_words": ["x"],
    "allowed_token_ids": [5, 6],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "structured_outputs": {"regex": "[ab]+"},
    "guided_json": {"type": "object"},
    "guided_regex": "[ab]+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_whitespace_pattern": " ?",
    "cache_salt": "salt",
    "priority": 1,
    "request_id": "mine",
    "use_beam_search": True,
    "length_penalty": 0.5,
    "messages": MESSAGES,
    "max_completion_tokens": 2,
    "top_logprobs": 1,
    "tools": [TOOL],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"quietly": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "a"}],
    "chat_template": "x",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "a"},
    "verbosity": "low",
    "web_search_options": {},
    "prompt": "Hi",
    "echo": True,
    "best_of": 2,
}
# What a field needs besides itself.
ALSO: dict[str, Any] = {
    "top_logprobs": {"logprobs": True},
    "tools": {"tool_choice": "none"},
    "tool_choice": {"tools": [TOOL]},
    "max_completion_tokens": {"max_tokens": None},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "stream_options": {"stream": True},
}


def rows(title: str) -> list[tuple[str, str]]:
    """Return the first two columns of the table below a title."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{title}\n")]
    return re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", found, flags=re.MULTILINE)


TABLES = {
    "Fields of chat and text completions": ("chat/completions", "completions"),
    "Fields of chat completions": ("chat/completions",),
    "Fields of text completions": ("completions",),
}
CASES = [
    (path, name, word)
    for title, paths in TABLES.items()
    for name, word in rows(title)
    for path in paths
]


def test_the_tables_have_every_field_once():
    names = [name for title in TABLES for name, _ in rows(title)]
    assert len(names) == len(set(names))
    known = {
        *ChatFields.__struct_fields__,
        *CompletionFields.__struct_fields__,
        *_UNSUPPORTED,
        *(f"stream_options.{name}" for name in StreamOptions.__struct_fields__),
    }
    listed = {name for title in TABLES for name, word in rows(title) if word != "ignored"}
    assert listed == known
    for title in (*TABLES, "Routes"):
        assert {word for _, word in rows(title)} <= WORDS


def call(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, answer.getheader("x-slipstream-ignored-fields"), answer.read()
    connection.close()
    return found


@pytest.mark.parametrize(("path", "name", "word"), CASES)
def test_a_field_is_served_as_the_page_says(serving, path, name, word):
    own: Any = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "Hi"}
    value = VALUES.get(name, 1)
    if path == "chat/completions" and name == "logprobs":
        value = True
    given = {name: value}
    if name.startswith("stream_options."):
        given = {"stream": True, "stream_options": {name.split(".")[1]: value}}
    body = {"model": "ensemble", "max_tokens": 2, **own, **ALSO.get(name, {}), **given}
    status, ignored, answer = call(serving.port, "POST", f"/v1/{path}", json.dumps(body).encode())
    if word == "refused":
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, name)
        return
    assert status == 200, answer
    assert ignored == (name if word == "ignored" else None)


@pytest.mark.parametrize(("route", "word"), rows("Routes"))
def test_a_route_exists_as_the_page_says(serving, route, word):
    method, path = route.split()
    status, _, answer = call(serving.port, method, re.sub(r"\{\w+\}", "ensemble", path), b"{}")
    unknown = status == 405 or (
        status == 404 and (b"unknown_url" in answer or not path.startswith("/v1/"))
    )
    assert unknown == (word == "no"), answer


def test_every_route_of_openai_and_anthropic_is_in_the_table(serving):
    _, _, document = call(serving.port, "GET", "/openapi.json")
    served = {
        f"{method.upper()} {path}"
        for path, methods in json.loads(document)["paths"].items()
        for method in methods
        if path.startswith("/v1/")
    }
    assert served <= {route for route, word in rows("Routes") if word == "yes"}
