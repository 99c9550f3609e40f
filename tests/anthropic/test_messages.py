"""/v1/messages with Anthropic's SDK: answers, events, tools, thinking, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest
from call_templates import HERMES, THINKING
from called_functions import WEATHER, GuidedText, called_by, replace_answers
from http_support import RunningServer
from response_calls import chatted
from wrong_values import wrong_bodies

from slipstream.server.anthropic.writer import Content
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.openai.answers.parts import CallArguments, CallStart, Reasoning
from slipstream.server.services import create_app, create_context

QUESTION: Any = [{"role": "user", "content": "Hello there"}]
TOOL: Any = {"name": "weather", "description": "Of a city", "input_schema": WEATHER}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Rome", "days": 2}
GREEDY = {"temperature": 0}  # not a parameter of the SDK any more


def sdk(port: int, key: str = "unused") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=20
    )


@pytest.fixture(scope="module")
def client(serving) -> Iterator[anthropic.Anthropic]:
    with sdk(serving.port) as client:
        yield client


@pytest.fixture
def calling(serving, monkeypatch):
    return called_by(serving, monkeypatch, HERMES)


def create(client, messages: Any = QUESTION, **fields):
    given = {
        "model": "chat",
        "messages": messages,
        "max_tokens": 12,
        "extra_body": GREEDY,
        **fields,
    }
    return client.messages.create(**given)


def prompt_tokens(message) -> int:
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_message_is_the_answer_of_chat_completions(serving, client):
    message = create(client, system="Be short.", metadata={"user_id": "me"})
    chat = chatted(serving, [{"role": "system", "content": "Be short."}, *QUESTION])
    (block,) = message.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert (message.type, message.role, message.model) == ("message", "assistant", "chat")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert prompt_tokens(message) == chat.usage.prompt_tokens
    assert message.usage.output_tokens == 12
    blocks: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    assert create(client, system=blocks).content == message.content


def test_blocks_are_the_messages_of_the_conversation(serving, client):
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "see", "input": {"x": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "see", "input": {"x": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "Sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "Rain"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "user", "content": "Now?"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "see", "arguments": text}}
        for name, text in (("t1", '{"x": "Rome"}'), ("t2", '{"x": "Bonn"}'))
    ]
    chat = chatted(
        serving,
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "Sun"},
            {"role": "tool", "tool_call_id": "t2", "content": "Rain"},
            {"role": "user", "content": "And?\nNow?"},
        ],
    )
    message = create(client, messages)
    assert message.content[0].text == chat.choices[0].message.content
    assert prompt_tokens(message) == chat.usage.prompt_tokens
    counted = client.messages.count_tokens(model="chat", messages=messages)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_an_answer_continues_the_assistants_message(serving, client):
    begun: Any = [*QUESTION, {"role": "assistant", "content": "It is"}]
    message = create(client, begun)
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    chat = chatted(serving, begun, extra_body=fields)
    assert message.content[0].text == chat.choices[0].message.content
    assert prompt_tokens(message) == chat.usage.prompt_tokens
    answered = chatted(serving, begun).usage.prompt_tokens
    assert answered > chat.usage.prompt_tokens  # a new message would have begun


def test_a_stream_has_the_events_of_the_whole_message(client):
    whole = create(client)
    events = list(create(client, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas >= 1  # how many depends on timing: tokens are joined under load
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert prompt_tokens(events[0].message) == prompt_tokens(whole)
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(
        model="chat", messages=QUESTION, max_tokens=12, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.content[0].text, final.stop_reason) == (text, "max_tokens")
    assert final.usage.output_tokens == 12


async def test_the_asynchronous_sdk_works(serving):
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{serving.port}", api_key="unused", max_retries=0
    ) as client:
        fields: Any = {"model": "chat", "messages": QUESTION, "max_tokens": 6, "extra_body": GREEDY}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text == whole.content[0].text


def test_the_stop_sequence_is_named_and_not_part_of_the_text(client):
    answer = create(client, max_tokens=40).content[0].text
    word = answer[10:13]
    text = answer[: answer.index(word)]
    fields: Any = {"max_tokens": 40, "stop_sequences": ["\x00never", word]}
    whole = create(client, **fields)
    assert [block.text for block in whole.content] == [text]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", word)
    with client.messages.stream(
        model="chat", messages=QUESTION, extra_body=GREEDY, **fields
    ) as stream:
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.stop_sequence) == (
        text,
        "stop_sequence",
        word,
    )


@pytest.mark.parametrize("pieces", [["Fine."], ["Fi", "ne."], []])
def test_a_complete_answer_ends_the_turn(serving, client, monkeypatch, pieces):
    replace_answers(serving, monkeypatch, [*pieces, ""])
    message = create(client, stop_sequences=["x"])
    assert [block.text for block in message.content] == ["".join(pieces)][: len(pieces)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (9, len(pieces) + 1)


def test_an_answer_may_end_with_the_context(client):
    message = create(client, max_tokens=100_000, extra_body={"ignore_eos": True})
    assert message.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_and_text_are_blocks_in_their_order(calling, client, monkeypatch, size):
    text = f"Let me see. \n{CALL}\n{CALL.replace('Rome', 'Bonn')} "
    replace_answers(
        calling, monkeypatch, [text[start : start + size] for start in range(0, len(text), size)]
    )
    whole = create(client, tools=[TOOL])
    said, first, second = whole.content
    assert (said.type, said.text, whole.stop_reason) == ("text", "Let me see.", "tool_use")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", ARGUMENTS)
    assert second.input == {"city": "Bonn", "days": 2}
    assert first.id != second.id
    with client.messages.stream(
        model="chat", messages=QUESTION, max_tokens=12, tools=[TOOL]
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[1:]] == [first.input, second.input]
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.index == 1
    ]
    assert json.loads("".join(pieces)) == ARGUMENTS
    assert final.stop_reason == "tool_use"


def test_tools_and_their_results_go_on(calling, client, monkeypatch):
    with monkeypatch.context() as patch:
        requests = replace_answers(calling, patch, [CALL])
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        called = create(client, tools=[TOOL], tool_choice=choice)
        assert GuidedText(requests[0].sampling.guide).complete(CALL)
    (call,) = called.content
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": called.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}],
        },
    ]
    message = create(client, messages, tools=[TOOL])
    earlier = {
        "id": call.id,
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
    }
    function = {"name": "weather", "description": "Of a city", "parameters": WEATHER}
    chat = chatted(
        calling,
        [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [earlier]},
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    assert prompt_tokens(message) == chat.usage.prompt_tokens
    assert message.content[0].text == chat.choices[0].message.content


def test_the_sdks_tool_runner_sends_the_whole_conversation(calling, client, monkeypatch):
    """It first tries to let the server keep the conversation, which the server rejects."""
    asked = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """Return the weather.

        Args:
            city: Name of the city.
            days: Number of days.
        """
        asked.append((city, days))
        return "Sunny"

    requests = replace_answers(calling, monkeypatch, [CALL])
    runner = client.beta.messages.tool_runner(
        model="chat", max_tokens=60, messages=QUESTION, tools=[weather], max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    assert asked == [("Rome", 2), ("Rome", 2)]
    prompt = calling.generator.tokenizer.decode(requests[1].prompt)
    assert "Hello there" in prompt
    assert prompt.endswith("[tool] Sunny\n[assistant] ")


def test_the_tool_choice_is_obeyed(calling, client):
    once = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **once}, {"type": "tool", "name": "weather"}):
        message = create(client, tools=[TOOL], tool_choice=choice, max_tokens=300)
        (call,) = message.content
        assert (call.type, call.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert set(call.input) == {"city", "days"}
    message = create(client, tools=[TOOL], tool_choice={"type": "none"})
    assert prompt_tokens(message) == chatted(calling, QUESTION).usage.prompt_tokens


def test_a_call_that_the_limit_cuts_off_has_no_input(calling, client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    forced: Any = {"tools": [TOOL], "tool_choice": choice}
    complete = create(client, **forced, max_tokens=300)
    message = create(client, **forced, max_tokens=complete.usage.output_tokens - 20)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content] == [{}]


class Answer(pydantic.BaseModel):
    colour: Literal["red", "blue"]


def test_structured_output_is_parsed_by_the_sdk(client):
    parsed = client.messages.parse(
        model="chat", messages=QUESTION, max_tokens=100, output_format=Answer
    )
    assert isinstance(parsed.parsed_output, Answer)


def test_thinking_is_a_block_with_a_signature():
    parts = [
        Reasoning("Let me "),
        Reasoning("think."),
        "Well",
        CallStart("call_1", "f"),
        CallArguments('{"a"'),
        CallArguments(": 1}"),
    ]
    content = Content(omit_thinking=False)
    events = [*content.push(parts), *content.finish()]
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        *("start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
    ]
    deltas = [event["delta"]["type"] for event in events[1:4]]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta"]
    thinking, text, call = content.blocks
    assert (thinking["thinking"], len(thinking["signature"])) == ("Let me think.", 44)
    assert (text["text"], call["input"], call["id"]) == ("Well", {"a": 1}, "toolu_1")
    omitted = Content(omit_thinking=True)
    assert len([*omitted.push(parts[:2]), *omitted.finish()]) == 3
    assert omitted.blocks[0]["thinking"] == ""


def test_what_the_model_thinks_is_a_block_and_goes_on(serving, client, monkeypatch):
    called_by(serving, monkeypatch, THINKING)
    pieces = ["<think>\nLet ", "me ", "see.\n</th", "ink>\n\nIt is", " Rome."]
    requests = replace_answers(serving, monkeypatch, pieces, real_tokens=True)
    fields: Any = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = create(client, **fields)
    thought, said = whole.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "Let me see.", "It is Rome.")
    rest = len(serving.generator.tokenizer.encode("\n\nIt is Rome.", False))
    thinking_tokens = whole.usage.output_tokens_details.thinking_tokens
    assert thinking_tokens + rest == whole.usage.output_tokens
    with client.messages.stream(model="chat", messages=QUESTION, **fields) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    assert final.content[0] == thought
    assert final.content[1].text == said.text
    assert kinds.index("signature_delta") == kinds.count("thinking_delta") > 1
    following = {"role": "user", "content": "And?"}
    create(client, [*QUESTION, {"role": "assistant", "content": whole.content}, following])
    prompt = serving.generator.tokenizer.decode(requests[-1].prompt)
    assert "<think>\nLet me see.\n</think>\n\nIt is Rome." in prompt
    assert prompt.endswith("[assistant] <think>\n\n</think>\n\n")  # not requested this time


def test_thinking_is_a_switch_of_the_chat_template(serving, client, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    monkeypatch.setattr(serving.generator.tokenizer, "chat_templates", {"default": template})
    requests = replace_answers(serving, monkeypatch, ["Fine."])
    decode = serving.generator.tokenizer.decode
    for thinking, shown in (
        (None, "False"),
        ({"type": "disabled"}, "False"),
        ({"type": "adaptive"}, "True"),
        ({"type": "enabled", "budget_tokens": 1024}, "True"),
    ):
        given = {} if thinking is None else {"thinking": thinking}
        create(client, max_tokens=2000, **given)
        assert decode(requests[-1].prompt).endswith(shown)


def test_a_stream_that_fails_ends_with_the_error(serving, client, monkeypatch):
    async def generate(request):
        yield TextOutput([5], text="Well", prompt_tokens=9)
        raise InferenceError("the engine stopped")

    monkeypatch.setattr(serving.generator, "generate", generate)
    seen = []
    with pytest.raises(anthropic.APIStatusError) as raised:
        seen.extend(create(client, stream=True))
    assert raised.value.body["error"]["message"] == "the engine stopped"
    assert raised.value.body["type"] == "error"


def test_a_key_is_sent_as_either_header(serving, monkeypatch):
    replace_answers(serving, monkeypatch, ["Fine."])
    context = create_context(access=Access(api_key="ours"))
    with RunningServer(create_app(serving.registry, serving.state, context)) as server:
        with sdk(server.port, "ours") as ours:
            assert create(ours).content[0].text == "Fine."
        with anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{server.port}", auth_token="ours", max_retries=0
        ) as bearer:
            assert create(bearer).content[0].text == "Fine."
        with sdk(server.port, "theirs") as theirs:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                create(theirs)
            assert raised.value.body["error"]["type"] == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                theirs.messages.count_tokens(model="chat", messages=QUESTION)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages must hold"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type: image",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "messages[0].content[0].type: redacted_thinking",
        ),
        (
            {
                "messages": [
                    *QUESTION,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages[1] has tool_use blocks without results",
        ),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort must be one of"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1"),
        ({"top_k": -5}, "top_k"),
        ({"stop_sequences": [" "]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management"),
    ],
)
def test_wrong_fields_are_named(calling, client, fields, text):
    body = {"model": "chat", "messages": QUESTION, "max_tokens": 5, **fields}
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.post("/v1/messages", body=body, cast_to=object)
    error = raised.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(text)
    assert error["request_id"] == raised.value.request_id


def test_other_errors_have_anthropics_format(serving, client):
    with pytest.raises(anthropic.NotFoundError) as raised:
        create(client, model="none")
    assert raised.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
    address = f"http://127.0.0.1:{serving.port}/v1/messages"
    assert httpx.get(address).json()["error"]["message"] == "GET is not allowed here, POST is"
    assert httpx.post(address, content=b"{").json()["error"]["type"] == "invalid_request_error"


def test_models_and_unknown_fields_are_answered_as_for_openai(serving, client):
    assert "chat" in [model.id for model in client.models.list().data]
    raw = client.messages.with_raw_response.create(
        model="chat", messages=QUESTION, max_tokens=1, extra_body={"strange": 1, "min_p": 0.1}
    )
    assert raw.headers["x-slipstream-ignored-fields"] == "strange"


EVERYTHING: Any = {
    "model": "chat",
    "system": [{"type": "text", "text": "Obey.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "Sun"}],
                }
            ],
        },
    ],
    "max_tokens": 2000,
    "stop_sequences": ["END"],
    "stream": False,
    "temperature": 1,
    "top_k": 5,
    "top_p": 1,
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "tools": [TOOL],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}},
    "metadata": {"user_id": "me"},
    "service_tier": "auto",
}


def test_no_wrong_value_is_an_internal_error(calling, monkeypatch):
    replace_answers(calling, monkeypatch, ["Fine."])
    failed = []
    with httpx.Client(base_url=f"http://127.0.0.1:{calling.port}") as client:
        for place, body in wrong_bodies(EVERYTHING):
            answer = client.post("/v1/messages", content=json.dumps(body))
            if answer.status_code not in (200, 400, 404) or (
                answer.status_code == 400 and not answer.json()["error"]["message"]
            ):
                failed.append((place, answer.text[:200]))
    assert failed == []
