"""/v1/responses with OpenAI's SDK: answers, events, tools, structured output and errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from call_templates import HERMES, THINKING
from called_functions import WEATHER, GuidedText, called_by, replace_answers
from response_calls import chatted, respond
from wrong_values import wrong_bodies

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.errors import InferenceError

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": WEATHER,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Rome", "days": 2}


@pytest.fixture
def calling(serving, monkeypatch):
    return called_by(serving, monkeypatch, HERMES)


def test_a_response_is_the_answer_of_chat_completions(serving):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello there"},
    ]
    chat = chatted(serving, messages)
    response = respond(serving, instructions="Be short.", metadata={"a": "b"}, user="me")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (response.object, response.error, response.model) == ("response", None, "chat")
    assert response.id.startswith("resp_")
    assert (response.instructions, response.metadata, response.user) == (
        "Be short.",
        {"a": "b"},
        "me",
    )
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0, 1, 12)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == (
        [],
        "auto",
        True,
    )
    assert (response.truncation, response.background) == ("disabled", False)
    assert response.text.format.type == "text"


def test_items_are_the_messages_of_the_conversation(serving):
    items: Any = [
        {"role": "developer", "content": "Obey."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "see", "arguments": '{"x": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "see", "arguments": '{"x": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sun"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "Rain"}],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "?"}],
        },
    ]
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "see", "arguments": text}}
        for number, text in ((1, '{"x": "Rome"}'), (2, '{"x": "Bonn"}'))
    ]
    messages = [
        {"role": "developer", "content": "Obey."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "Rain"},
        {"role": "user", "content": "And\n?"},
    ]
    chat = chatted(serving, messages)
    response = respond(serving, items)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    counted = serving.client.responses.input_tokens.count(model="chat", input=items)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_stream_has_the_events_of_the_whole_response(serving):
    whole = respond(serving, top_logprobs=2)
    events = list(respond(serving, top_logprobs=2, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas >= 1  # how many depends on timing: tokens are joined under load
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert events[2].item.status == "in_progress"
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in pieces) == whole.output_text
    assert {event.item_id for event in pieces} == {events[2].item.id}
    final = events[-1].response
    assert final.output_text == events[-4].text == whole.output_text
    assert final.usage.output_tokens == 12
    assert final.output[0].status == "incomplete"
    scores = final.output[0].content[0].logprobs
    assert [score.token for score in scores] == [
        score.token for event in pieces for score in event.logprobs
    ]
    assert [score.logprob for score in scores] == pytest.approx(
        [score.logprob for score in whole.output[0].content[0].logprobs], rel=1e-4
    )
    assert len(scores) == 12
    assert {len(score.top_logprobs) for score in scores} == {2}


def test_events_are_named_on_the_wire(serving):
    body = {"model": "chat", "input": "Hi", "stream": True, "max_output_tokens": 2}
    answer = httpx.post(f"http://127.0.0.1:{serving.port}/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_log_probs_are_those_of_chat_completions(serving):
    chat = chatted(serving, [{"role": "user", "content": "Hello there"}], logprobs=True)
    response = respond(serving, include=["message.output_text.logprobs"])
    scores = response.output[0].content[0].logprobs
    expected = chat.choices[0].logprobs.content
    assert [(score.token, score.bytes) for score in scores] == [
        (score.token, score.bytes) for score in expected
    ]
    assert respond(serving).output[0].content[0].logprobs == []


class Answer(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    count: Literal[1, 2, 3]


def test_structured_output_is_parsed_by_the_sdk(serving):
    for seed in range(3):
        parsed = serving.client.responses.parse(
            model="chat",
            input="Answer.",
            text_format=Answer,
            temperature=5,
            max_output_tokens=200,
            extra_body={"seed": seed},
        )
        assert isinstance(parsed.output_parsed, Answer)
        assert (parsed.status, parsed.text.format.type) == ("completed", "json_schema")
    with serving.client.responses.stream(
        model="chat", input="Answer.", text_format=Answer, max_output_tokens=200
    ) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Answer)
    any_object = respond(serving, text={"format": {"type": "json_object"}}, max_output_tokens=200)
    if any_object.status == "completed":
        assert isinstance(json.loads(any_object.output_text), dict)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_and_text_are_items_in_their_order(calling, monkeypatch, size):
    text = f"Let me see. \n{CALL}\n{CALL.replace('Rome', 'Bonn')} "
    replace_answers(
        calling, monkeypatch, [text[start : start + size] for start in range(0, len(text), size)]
    )
    whole = respond(calling, tools=[TOOL])
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert (whole.output_text, whole.status) == ("Let me see.", "completed")
    first, second = whole.output[1:]
    assert (first.name, json.loads(first.arguments), first.status) == (
        "weather",
        ARGUMENTS,
        "completed",
    )
    assert json.loads(second.arguments)["city"] == "Bonn"
    assert first.call_id != second.call_id
    assert (whole.tools[0].name, whole.tools[0].strict) == ("weather", True)
    with calling.client.responses.stream(model="chat", input="?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [(item.type, getattr(item, "arguments", "")) for item in final.output] == [
        (item.type, getattr(item, "arguments", "")) for item in whole.output
    ]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.name, event.arguments) for event in done] == [
        (1, "weather", first.arguments),
        (2, "weather", second.arguments),
    ]
    pieces = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.output_index == 1
    ]
    assert "".join(pieces) == first.arguments


def test_tools_and_their_outputs_continue_a_stored_response(calling, monkeypatch):
    with monkeypatch.context() as patch:
        requests = replace_answers(calling, patch, [CALL])
        first = respond(calling, "Weather?", tools=[TOOL], parallel_tool_calls=False)
        assert GuidedText(requests[0].sampling.guide).complete(CALL)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    second = respond(calling, [output], previous_response_id=first.id, tools=[TOOL])
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny"},
    ]
    function = {key: value for key, value in TOOL.items() if key != "type"}
    chat = chatted(calling, messages, tools=[{"type": "function", "function": function}])
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.previous_response_id == first.id
    # the same without stored state: the items are sent back
    items = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), output]
    stateless = respond(calling, items, tools=[TOOL], store=False)
    assert stateless.output_text == second.output_text
    assert stateless.usage.input_tokens == second.usage.input_tokens


def test_a_required_or_named_function_is_called(calling):
    for choice in ("required", {"type": "function", "name": "weather"}):
        response = respond(
            calling,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=300,
        )
        (call,) = response.output
        assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
        assert set(json.loads(call.arguments)) == {"city", "days"}


def test_a_call_that_the_limit_cuts_off_is_incomplete(calling):
    forced: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    complete = respond(calling, **forced, max_output_tokens=300)
    limit = complete.usage.output_tokens - 20
    response = respond(calling, **forced, max_output_tokens=limit)
    (call,) = response.output
    assert (call.type, call.status, response.status) == (
        "function_call",
        "incomplete",
        "incomplete",
    )
    assert complete.output[0].arguments.startswith(call.arguments)
    assert 0 < len(call.arguments) < len(complete.output[0].arguments)
    # the conversation goes on without it
    again = respond(calling, "Again", previous_response_id=response.id)
    messages = [{"role": "user", "content": "Hello there"}, {"role": "user", "content": "Again"}]
    assert again.usage.input_tokens == chatted(calling, messages).usage.prompt_tokens


def test_only_allowed_tools_are_called(calling):
    others: Any = [{"type": "function", "name": f"other_{number}"} for number in range(9)]
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    response = respond(
        calling,
        tools=[*others, TOOL],
        tool_choice=allowed,
        parallel_tool_calls=False,
        temperature=3,
        max_output_tokens=300,
    )
    assert [item.name for item in response.output] == ["weather"]
    assert (response.tool_choice.type, response.tool_choice.mode) == ("allowed_tools", "required")
    assert len(response.tools) == 10


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item_before_the_answer(serving, monkeypatch, summary):
    called_by(serving, monkeypatch, THINKING)
    pieces = ["<think>\nLet ", "me ", "see.\n</th", "ink>\n\nIt is", " Rome."]
    requests = replace_answers(serving, monkeypatch, pieces, real_tokens=True)
    fields: Any = {"reasoning": {"effort": "low", "summary": summary}}
    whole = respond(serving, **fields)
    thought, _ = whole.output
    assert (thought.type, whole.output_text) == ("reasoning", "It is Rome.")
    told = thought.summary if summary else thought.content
    assert [part.text for part in told] == ["Let me see."]
    rest = len(serving.generator.tokenizer.encode("\n\nIt is Rome.", False))
    reasoning_tokens = whole.usage.output_tokens_details.reasoning_tokens
    assert reasoning_tokens + rest == whole.usage.output_tokens
    assert whole.reasoning.effort == "low"
    with serving.client.responses.stream(model="chat", input="Hello there", **fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kind = "response.reasoning_summary_text" if summary else "response.reasoning_text"
    deltas = [event.delta for event in events if event.type == f"{kind}.delta"]
    assert "".join(deltas) == "Let me see."
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == "It is Rome."
    # the reasoning goes on with the conversation, stored or sent back
    asked = {"role": "user", "content": "Hello there"}
    following = {"role": "user", "content": "And?"}
    respond(serving, [following], previous_response_id=whole.id)
    respond(serving, [asked, *whole.model_dump()["output"], following])
    prompts = [serving.generator.tokenizer.decode(request.prompt) for request in requests[-2:]]
    assert prompts[0] == prompts[1]
    assert "<think>\nLet me see.\n</think>\n\nIt is Rome." in prompts[0]


def test_a_stream_that_fails_ends_with_the_error(serving, monkeypatch):
    async def generate(request):
        yield TextOutput([5], text="Well", prompt_tokens=9)
        raise InferenceError("the engine stopped")

    monkeypatch.setattr(serving.generator, "generate", generate)
    events = list(respond(serving, stream=True))
    error, failed = events[-2:]
    assert (error.type, error.message) == ("error", "the engine stopped")
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (failed.response.error.code, failed.response.error.message) == (
        "server_error",
        "the engine stopped",
    )
    assert serving.client.responses.retrieve(failed.response.id).status == "failed"
    with pytest.raises(openai.APIStatusError, match="the engine stopped"):
        respond(serving)


async def test_the_asynchronous_sdk_works(serving):
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="unused", max_retries=0
    ) as client:
        fields: Any = {"model": "chat", "input": "Hello there", "temperature": 0}
        whole = await client.responses.create(**fields, max_output_tokens=6)
        async with client.responses.stream(**fields, max_output_tokens=6) as stream:
            deltas = [event.delta async for event in stream if event.type.endswith("text.delta")]
        assert "".join(deltas) == whole.output_text
        stored = await client.responses.retrieve(whole.id)
        assert stored.output_text == whole.output_text
        await client.responses.delete(whole.id)


def test_truncation_leaves_out_the_oldest_messages(serving):
    old = [
        {"role": role, "content": f"{number} " + "word " * 60}
        for number in range(60)
        for role in ("user", "assistant")
    ]
    items: Any = [{"role": "system", "content": "Obey."}, *old, {"role": "user", "content": "Now?"}]
    with pytest.raises(openai.BadRequestError, match="tokens") as raised:
        respond(serving, items)
    assert (raised.value.param, raised.value.code) == ("input", "context_length_exceeded")
    response = respond(serving, items, truncation="auto", max_output_tokens=2)
    kept = [
        count
        for count in range(len(old))
        if _tokens(serving, [items[0], *old[count:], items[-1]]) == response.usage.input_tokens
    ]
    (left_out,) = kept
    assert left_out > 0
    with pytest.raises(openai.BadRequestError):
        respond(serving, [items[0], *old[left_out - 1 :], items[-1]])


def _tokens(serving, messages) -> int:
    """Return the number of tokens of a conversation with the server's template."""
    text = "".join(f"[{message['role']}] {message['content']}\n" for message in messages)
    tokenizer = serving.generator.tokenizer
    return 1 + len(tokenizer.encode(text + "[assistant] ", add_special_tokens=False))


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "some"}}, "tool_choice.tools"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tool_choice.tools[0]",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["x"]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_wrong_fields_are_named(calling, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        calling.client.responses.create(model="chat", extra_body={"input": "Hi", **fields})
    assert raised.value.param == param


def test_unknown_fields_are_listed_and_a_wrong_model_is_not_found(serving):
    raw = serving.client.responses.with_raw_response.create(
        model="chat", input="Hi", max_output_tokens=1, extra_body={"strange": 1, "top_k": 1}
    )
    assert raw.headers["x-slipstream-ignored-fields"] == "strange"
    with pytest.raises(openai.NotFoundError):
        respond(serving, model="none")


EVERYTHING: Any = {
    "model": "chat",
    "instructions": "Obey.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "id": "o", "call_id": "c", "output": "Sun"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "x"}],
        },
    ],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {
        "format": {"type": "json_schema", "name": "a", "schema": WEATHER},
        "verbosity": "medium",
    },
    "tools": [TOOL],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "max_tool_calls": 2,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": False,
    "stream": False,
    "background": False,
    "stream_options": None,
    "temperature": 1,
    "top_p": 1,
    "truncation": "auto",
    "user": "me",
}


def test_no_wrong_value_is_an_internal_error(calling, monkeypatch):
    replace_answers(calling, monkeypatch, ["Fine."])
    failed = []
    with httpx.Client(base_url=f"http://127.0.0.1:{calling.port}") as client:
        for place, body in wrong_bodies(EVERYTHING):
            answer = client.post("/v1/responses", content=json.dumps(body))
            if answer.status_code not in (200, 400, 404) or (
                answer.status_code == 400 and not answer.json()["error"]["message"]
            ):
                failed.append((place, answer.text[:200]))
    assert failed == []
