"""Generated wrong requests to every route of OpenAI's and Anthropic's APIs.

Each case is a good body with one value replaced. The answer is a 4xx in the API's error format, or
a 200 where the value is allowed. Afterwards good requests answer as before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from bad_requests.json_mutants import Path, paths, removed, replaced
from bad_requests.openai_bodies import POOLING_ROUTES, TEXT_ROUTES, GoodRequest
from http_support import Connection, RunningServer, request_bytes, wait_until
from pooling_server import LAST, add_modules, pooling_server, save_pooling_model

from slipstream.server.kserve.access import Access
from slipstream.server.openai import fields as openai_fields
from slipstream.server.openai.errors import ApiError
from slipstream.server.services import create_app, create_context

ADMIN = "the admin key"
DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
# One value of each type, those at the edges, and large ones.
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    -(2**70),
    1e308,
    "",
    "nan",
    "a\ud800b",
    "\0\n",
    "x" * 100_000,
    [],
    ["x", 1, None],
    [{}],
    [[]],
    [1] * 5000,
    {},
    {"x": {"y": None}},
    DEEP,
)
# Without one of these an answer is as long as the context.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# The default tests send one case in this many. The next place then gets other values.
STEP = 9
LONGEST_MESSAGE = 1000


class Case(NamedTuple):
    route: str
    place: Path  # of the value that is replaced
    value: str
    body: Any


def generated_cases(good: Sequence[GoodRequest]) -> Iterator[Case]:
    for route, body, kept in good:
        yield Case(route, (), "the good body", body)
        for place in paths(body):
            if place[0] in kept:
                continue
            limit = place[-1] in LIMITS
            for value in WRONG_VALUES[limit:]:
                yield Case(route, place, repr(value)[:40], replaced(body, place, value))
            if not limit:
                yield Case(route, place, "missing", removed(body, place))


class Sender:
    def __init__(self, port: int) -> None:
        self._connection = Connection(port)

    def send(self, route: str, body: Any) -> tuple[int, bytes]:
        headers = [["Authorization", f"Bearer {ADMIN}"]]
        self._connection.send(request_bytes("POST", route, headers, json.dumps(body).encode()))
        answer = self._connection.answer()
        assert answer is not None, f"{route} closed the connection"
        return answer.status, answer.body

    def close(self) -> None:
        self._connection.socket.close()


def problem_of(case: Case, status: int, body: bytes) -> str:
    """Return what is wrong with an answer; an empty text if nothing is."""
    if status == 200:
        return "an error in a stream" if b"the server's log" in body else ""
    if not case.place and "lora" not in case.route:
        return "the good body is refused"
    if not 400 <= status < 500:
        return "not a 4xx"
    document = json.loads(body)
    error = document["error"]
    message = error["message"]
    if not message or len(message) > LONGEST_MESSAGE:
        return "no message, or one that is too long"
    if case.route.startswith("/v1/messages"):
        expected = {"type", "error", "request_id"}
        return "" if set(document) == expected and error["type"] else "not Anthropic's format"
    if set(error) != {"message", "type", "param", "code"}:
        return "not OpenAI's format"
    names_field = error["param"] is not None or message.startswith("The body is not valid JSON")
    return "" if names_field else "the error names no field"


def answer_texts(sender: Sender, good: Sequence[GoodRequest]) -> list[Any]:
    """Return the answers to good requests, without what differs from one to the next."""
    answers = []
    for route, body, _ in good:
        if body.get("stream") or "lora" in route:
            continue
        status, text = sender.send(route, {**body, "temperature": 0})
        assert status == 200, text
        answers.append(_same_each_time(json.loads(text)))
    return answers


def _same_each_time(value: Any) -> Any:
    changing = ("id", "call_id", "created", "created_at", "completed_at", "usage")
    if isinstance(value, dict):
        return {key: _same_each_time(one) for key, one in value.items() if key not in changing}
    if isinstance(value, list):
        return [_same_each_time(one) for one in value]
    return value


def check_answers(port: int, engine: Any, good: Sequence[GoodRequest], step: int, log: Any) -> None:
    sender = Sender(port)
    before = answer_texts(sender, good)
    problems = []
    with log.at_level(logging.ERROR):
        for case in [*generated_cases(good)][::step]:
            status, body = sender.send(case.route, case.body)
            if problem := problem_of(case, status, body):
                place = ".".join(map(str, case.place))
                problems.append(f"{case.route} {place} {case.value}: {problem}: {body[:200]!r}")
    assert problems == []
    assert [record.getMessage() for record in log.records if record.exc_info] == []
    assert answer_texts(sender, good) == before
    wait_until(lambda: engine.outstanding == 0 and engine.stats.running == 0)
    sender.close()


def check_text_routes(serving: Any, step: int, log: Any) -> None:
    access = Access(admin_key=ADMIN)
    app = create_app(serving.registry, serving.state, create_context(access=access))
    with RunningServer(app) as server:
        check_answers(server.port, serving.engine, TEXT_ROUTES, step, log)


def test_wrong_values_are_answered_with_errors_that_name_the_field(serving, caplog):
    check_text_routes(serving, STEP, caplog)


@pytest.mark.slow
def test_every_wrong_value_is_answered_with_an_error(serving, caplog):
    check_text_routes(serving, 1, caplog)


def test_wrong_values_of_pooling_routes_are_answered_with_errors(tmp_path, caplog):
    save_pooling_model(tmp_path / "hf", "qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True)
    add_modules(tmp_path / "hf", LAST, "Normalize")
    with pooling_server(tmp_path, "Qwen3ForCausalLM") as server:
        check_answers(server.port, server.engine, POOLING_ROUTES, 1, caplog)


WRONG_TYPES = (
    ("tools[0].function.description", {"tools": [{"function": {"name": "f", "description": 1}}]}),
    ("tools[0].function.strict", {"tools": [{"function": {"name": "f", "strict": "yes"}}]}),
    ("tools[0].function.parameters", {"tools": [{"function": {"name": "f", "parameters": []}}]}),
    (
        "tools[1].function.parameters",
        {
            "tools": [
                {"function": {"name": "f"}},
                {"function": {"name": "g", "parameters": {"properties": {"x": {"type": "set"}}}}},
            ]
        },
    ),
    (
        "response_format",
        {
            "tools": [{"function": {"name": "f"}}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "set"}},
            },
        },
    ),
    (
        "response_format.json_schema.strict",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "strict": 1},
            }
        },
    ),
)


@pytest.mark.parametrize(("param", "fields"), WRONG_TYPES)
def test_errors_name_the_function_or_the_format_that_is_wrong(serving, param, fields):
    tools = [{"type": "function", **tool} for tool in fields.get("tools", [])]
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **fields}
    sender = Sender(serving.port)
    status, answer = sender.send("/v1/chat/completions", {**body, "tools": tools})
    sender.close()
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param)
    assert " | " not in error["message"]  # no part of the server's own grammar


def test_long_conversations_have_the_fields_and_errors_of_short_ones(monkeypatch):
    monkeypatch.setattr(openai_fields, "_MAX_CONVERTED", 2)
    messages: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    given = {"model": "m", "messages": messages, "max_tokens": 3}
    expected = openai_fields.ChatFields(model="m", messages=messages, max_tokens=3)
    assert openai_fields.convert_fields(given, openai_fields.ChatFields) == expected
    for wrong, param in (({"max_tokens": "x"}, "max_tokens"), ({"n": []}, "n")):
        with pytest.raises(ApiError) as caught:
            openai_fields.convert_fields({**given, **wrong}, openai_fields.ChatFields)
        assert caught.value.param == param
    wrong_messages = [*messages[:3], "text", *messages[3:]]
    with pytest.raises(ApiError, match=r"messages\[3\]: expected `object`, got `str`"):
        openai_fields.convert_fields(given | {"messages": wrong_messages}, openai_fields.ChatFields)
