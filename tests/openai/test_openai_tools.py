"""Tools: shown by the model's chat template, called in its format and returned as calls."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from call_templates import ANSWERS, FORMATS, HERMES, LLAMA, PARTS, PLAIN
from called_functions import (
    MESSAGES,
    TOOLS,
    WEATHER,
    GuidedText,
    called_by,
    chat,
    check_read,
    prompt_ids,
    replace_answers,
    streamed_calls,
)

from slipstream.server.openai.tools import call_formats
from slipstream.server.openai.tools.call_reader import CallReader

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture
def calling(serving, monkeypatch):
    return called_by(serving, monkeypatch, HERMES)


@pytest.fixture(params=[HERMES, LLAMA], ids=["hermes", "llama"])
def either(serving, monkeypatch, request):
    """Serve a chat template of one format, then of the other."""
    return called_by(serving, monkeypatch, request.param)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call_is_made_and_matches_its_schema(either, choice):
    named = set()
    for seed in range(6):
        answer = chat(
            either, tool_choice=choice, parallel_tool_calls=False, temperature=9, seed=seed
        )
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        (call,) = message.tool_calls
        schema = (
            WEATHER if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        )
        jsonschema.validate(json.loads(call.function.arguments), schema)
        named.add(call.function.name)
    assert named == ({"weather", "now"} if choice == "required" else {"weather"})


def test_the_chat_template_gets_the_tools_and_the_history(either):
    answer = chat(either, tool_choice="auto", max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(either, MESSAGES))
    answer = chat(either, tool_choice="none", max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(either, MESSAGES, None))
    called = (
        chat(either, tool_choice="required", parallel_tool_calls=False, temperature=9, seed=1)
        .choices[0]
        .message
    )
    messages = [
        *MESSAGES,
        called,
        {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."},
    ]
    function = called.tool_calls[0].function
    plain = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": function.name,
                        "arguments": json.loads(function.arguments),
                    },
                }
            ],
        },
        {"role": "tool", "content": "Sunny."},
    ]
    answer = chat(either, messages=messages, max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(either, plain))


def test_text_without_a_call_is_unchanged_by_tools(either):
    """The grammar does not change free text, and held text is sent at the end of the stream."""
    free = (
        either.client.completions.create(
            model="chat", prompt=prompt_ids(either, MESSAGES), temperature=0, max_tokens=60
        )
        .choices[0]
        .text
    )
    answer = chat(either, max_tokens=60).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (
        free,
        None,
        "length",
    )
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in chat(either, max_tokens=60, stream=True)
    ]
    assert "".join(pieces) == free


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_within_text_are_separated_whole_and_streamed(calling, monkeypatch, size):
    text = f"Let me see < a <tool. \n{CALL}\n{CALL.replace('Rome', 'Bonn')} "
    replace_answers(
        calling, monkeypatch, [text[start : start + size] for start in range(0, len(text), size)]
    )
    whole = chat(calling).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("Let me see < a <tool.", "tool_calls")
    calls = [
        (call.type, call.function.name, json.loads(call.function.arguments))
        for call in whole.message.tool_calls
    ]
    assert calls == [
        ("function", "weather", {"city": city, "days": 2}) for city in ("Rome", "Bonn")
    ]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    chunks = [chunk.choices[0] for chunk in chat(calling, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert streamed_calls(chunks) == [
        (index, call.function.name, call.function.arguments)
        for index, call in enumerate(whole.message.tool_calls)
    ]
    assert chunks[-1].finish_reason == "tool_calls"


WEATHER_CALL = ("weather", '{"city": "Rome", "days": 2}')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL[:40], [("weather", "")]),  # the end of the answer cut the call off
        (CALL[: CALL.index("ays")], [("weather", '{"city": "Rome", "d')]),
        ("a <tool_call>no JSON</tool_call> b", ["a <tool_call>no JSON</tool_call> b"]),
        (f"a {CALL} b {CALL[:20]}", ["a", WEATHER_CALL, "b"]),
        # the end mark was a stop word
        (CALL.removesuffix("</tool_call>"), [WEATHER_CALL]),
        (
            CALL.replace("Rome", "</tool_call>"),
            [("weather", WEATHER_CALL[1].replace("Rome", "</tool_call>"))],
        ),
        (CALL.replace("Rome", '\\"}}'), [("weather", WEATHER_CALL[1].replace("Rome", '\\"}}'))]),
        ("  spaces \n", ["  spaces \n"]),
        ("", []),
        ("a <to", ["a <to"]),
        ("a <tool_cal", ["a"]),
        (f"{CALL} \n", [WEATHER_CALL]),
    ],
)
def test_text_and_calls_are_separated(text, parts):
    check_read(lambda: CallReader(call_formats.HERMES), text, parts)


BARE_CALL = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BARE_CALL, [WEATHER_CALL]),
        (f"<|python_tag|>{BARE_CALL}", [WEATHER_CALL]),
        (BARE_CALL[:54], [("weather", '{"city": "Rome", "da')]),
        ("", []),
        *[
            (text, [text])
            for text in (
                "Sunny.",
                '{"name',
                '{"name": 5}',
                f"I call {BARE_CALL}",
                '{"name": "weather"}',
            )
        ],
        ('{"name": "f", "parameters": []}', ['{"name": "f", "parameters": []}']),
    ],
)
def test_a_bare_call_is_the_whole_answer(text, parts):
    check_read(lambda: CallReader(call_formats.LLAMA), text, parts)


def test_text_without_a_call_is_streamed_immediately():
    reader = CallReader(call_formats.LLAMA)
    assert [list(reader.push(piece)) for piece in ("{", '"n', "o", "pe")] == [
        [],
        [],
        ['{"no'],
        ["pe"],
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_served_whole_and_streamed(serving, monkeypatch, name):
    """The answers are the same, and so are the ids of calls in the stream's chunks."""
    called_by(serving, monkeypatch, FORMATS[name][1])
    answer = ANSWERS[name]
    pieces = [answer[start : start + 3] for start in range(0, len(answer), 3)]
    requests = replace_answers(serving, monkeypatch, pieces)
    whole = chat(serving).choices[0]
    prompt = serving.generator.tokenizer.decode(requests[0].prompt)
    assert "weather" in prompt.partition("What is the weather?")[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [part for part in PARTS[name] if isinstance(part, tuple)]
    assert whole.message.content == ("Let me see." if name != "llama" else None)
    assert whole.finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in chat(serving, stream=True)]
    assert [call[1:] for call in streamed_calls(chunks)] == calls
    assert len([chunk for chunk in chunks if chunk.delta.tool_calls]) > 2 * len(calls)
    reasoning = [chunk.delta.model_extra.get("reasoning_content", "") for chunk in chunks]
    assert "".join(reasoning) == ("Rome it is." if name == "harmony" else "")


@pytest.mark.parametrize("name", FORMATS)
def test_earlier_calls_are_rendered_by_every_template(serving, monkeypatch, name):
    """Some templates take the arguments as text only, and some take ids of 9 characters only."""
    called_by(serving, monkeypatch, FORMATS[name][1])
    replace_answers(serving, monkeypatch, [ANSWERS[name]])
    first = chat(serving).choices[0].message
    ids = [call.id for call in first.tool_calls]
    for call_id in (ids[0], "call_of_another_server"):
        message = first.model_dump(exclude_none=True)
        message["tool_calls"][0]["id"] = call_id
        messages = [
            *MESSAGES,
            message,
            {"role": "tool", "tool_call_id": call_id, "content": "Sunny."},
        ]
        requests = replace_answers(serving, monkeypatch, ["It is sunny."])
        answer = chat(serving, messages=messages).choices[0]
        assert (answer.message.content, answer.message.tool_calls) == (
            "It is sunny.",
            None,
        )
        prompt = serving.generator.tokenizer.decode(requests[0].prompt)
        assert "Rome" in prompt
        assert "Sunny." in prompt


def test_a_call_that_the_token_limit_cuts_off_is_returned_as_far_as_it_goes(calling, monkeypatch):
    replace_answers(
        calling, monkeypatch, ["Let me", " see.", CALL[: CALL.index("ome")]], reason="length"
    )
    answer = chat(calling).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("Let me see.", "length")
    assert answer.message.tool_calls[0].function.arguments == '{"city": "R'
    replace_answers(calling, monkeypatch, ["<tool", "_cal"], reason="length")
    answer = chat(calling).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == ("", None)


def test_required_calls_of_a_random_model_may_be_several(calling):
    counts = set()
    for seed in range(3):
        choice = chat(
            calling, tool_choice="required", temperature=2, seed=seed, max_tokens=200
        ).choices[0]
        *calls, last = choice.message.tool_calls
        counts.add(len(calls) + 1)
        complete = calls if choice.finish_reason == "length" else [*calls, last]
        for call in complete:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, WEATHER if call.function.name == "weather" else {})
        assert choice.message.content is None
    assert max(counts) > 1


def test_the_start_mark_is_always_followed_by_a_call(calling, monkeypatch):
    request = replace_answers(calling, monkeypatch, ["x"])
    chat(calling, parallel_tool_calls=False)
    chat(calling)
    assert request[0].stop_words == []
    one = GuidedText(request[0].sampling.guide)
    many = GuidedText(request[1].sampling.guide)
    for guided in (one, many):
        for free in ("<tool_call x", "a < b", CALL):
            assert guided.allows_each_letter(free)
        begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
        assert guided.allows(begun)
        for wrong in ('<tool_call>\n{"name": "x', "<tool_call>a", begun[:-1] + "i", begun + "b"):
            assert not guided.allows(wrong)
    assert one.complete(CALL)
    assert many.allows_each_letter(f"{CALL} and more, {CALL}")


def test_the_start_of_a_bare_call_is_completed_and_ends_the_answer(serving, monkeypatch):
    called_by(serving, monkeypatch, LLAMA)
    request = replace_answers(serving, monkeypatch, ["x"])
    chat(serving)
    guided = GuidedText(request[0].sampling.guide)
    for free in ('{"name": 5}', '{"nam', "a < b", f"I call {BARE_CALL} now", '\n{"name": "x"}'):
        assert guided.allows_each_letter(free), free
    begun = '{"name": "weather", "parameters": {"city": "Ro'
    assert guided.allows_each_letter(begun)
    for wrong in ('{"name": "x', begun[:-1] + "i", begun + "b"):
        assert not guided.allows(wrong)
    assert guided.complete(BARE_CALL)
    assert not guided.complete(BARE_CALL[:-1])


ALLOWED = {"type": "function", "function": {"name": "now"}}


def test_allowed_tools_limit_the_calls_and_not_the_prompt(calling, monkeypatch):
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ALLOWED]}}
        request = replace_answers(calling, monkeypatch, ["x"])
        chat(calling, tool_choice=choice)
        assert request[0].prompt == prompt_ids(calling, MESSAGES)
        guided = GuidedText(request[0].sampling.guide)
        assert guided.allows_each_letter('<tool_call>\n{"name": "now", "arguments": {}}')
        assert not guided.allows('<tool_call>\n{"name": "w')
        assert guided.allows("x") == (mode == "auto")


def test_text_beside_tools_obeys_its_response_format(calling):
    schema = {"enum": ["first", "second"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = set()
    for seed in range(12):
        message = (
            chat(calling, response_format=wanted, temperature=9, seed=seed, max_tokens=12)
            .choices[0]
            .message
        )
        found.add(message.content)
    assert found == {'"first"', '"second"', ""}  # "" is the beginning of a call
    answer = chat(
        calling, response_format=wanted, tool_choice="required", parallel_tool_calls=False
    )
    assert answer.choices[0].finish_reason == "tool_calls"


def test_tools_are_described_in_the_messages_where_the_template_does_not_show_them(
    serving, monkeypatch
):
    called_by(serving, monkeypatch, PLAIN)
    requests = replace_answers(serving, monkeypatch, [CALL])
    first = chat(serving).choices[0].message
    assert first.tool_calls[0].function.arguments == WEATHER_CALL[1]
    decode = serving.generator.tokenizer.decode
    prompt = decode(requests[0].prompt)
    assert prompt.startswith("[system] You can call functions")
    assert json.dumps(WEATHER) in prompt
    assert (
        '<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
        in prompt
    )
    assert prompt.endswith("\n[user] What is the weather?\n[assistant] ")
    results = [
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": text}
        for text in ("Sunny.", "Dry.")
    ]
    system = {"role": "system", "content": "Be brief."}
    chat(serving, messages=[system, *MESSAGES, first, *results])
    prompt = decode(requests[1].prompt)
    assert prompt.startswith("[system] Be brief.\n\nYou can call functions")
    response = "<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nDry.\n</tool_response>"
    assert prompt.endswith(f"\n[assistant] {CALL}\n[user] {response}\n[assistant] ")


def test_tools_go_to_the_first_message_where_the_template_has_no_system_role(serving, monkeypatch):
    called_by(serving, monkeypatch, PLAIN + "{% if false %}'user' or 'assistant' only{% endif %}")
    requests = replace_answers(serving, monkeypatch, ["x"])
    chat(serving)
    prompt = serving.generator.tokenizer.decode(requests[0].prompt)
    assert prompt.startswith("[user] You can call functions")
    assert prompt.endswith("</tool_call>\n\nWhat is the weather?\n[assistant] ")


def test_a_required_call_works_without_a_template_for_tools(serving, monkeypatch):
    called_by(serving, monkeypatch, PLAIN)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ({"type": "function", "function": {"name": "f"}}, "required"):
        answer = chat(serving, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {})


FUNCTION = TOOLS[0]["function"]
# No value satisfies this schema.
ENDLESS = {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "string"}},
                    }
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {**FUNCTION, "parameters": {"properties": {"a": {"not": {}}}}},
                    }
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [{"type": "function", "function": {**FUNCTION, "parameters": ENDLESS}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [ALLOWED, {"type": "function"}]},
                }
            },
            "tool_choice.allowed_tools.tools[1]",
        ),
        ({"functions": [FUNCTION]}, "functions"),
    ],
)
def test_wrong_tools_are_an_error_with_the_name_of_the_field(calling, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        calling.client.chat.completions.create(
            model="chat", messages=MESSAGES, tools=TOOLS, extra_body=fields
        )
    assert raised.value.param == param
