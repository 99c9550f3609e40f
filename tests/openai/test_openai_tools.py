"""Tools: shown by the model's chat template, called in its format and returned as calls."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from called_functions import (
    BARE_TEMPLATE,
    MARKED_TEMPLATE,
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

from slipstream.server.openai.tools.call_reader import CallReader

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture
def calling(serving, monkeypatch):
    return called_by(serving, monkeypatch, MARKED_TEMPLATE)


@pytest.fixture(params=[MARKED_TEMPLATE, BARE_TEMPLATE], ids=["marked", "bare"])
def either(serving, monkeypatch, request):
    """Serve a chat template of one format, then of the other."""
    return called_by(serving, monkeypatch, request.param)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call_is_made_and_matches_its_schema(either, choice):
    named = set()
    for seed in range(6):
        answer = chat(either, tool_choice=choice, temperature=9, seed=seed)
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
    called = chat(either, tool_choice="required", temperature=9, seed=1).choices[0].message
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


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL[:40], [CALL[:40]]),  # an incomplete call is text
        ("a <tool_call>no JSON</tool_call> b", ["a", " <tool_call>no JSON</tool_call> b"]),
        (f"a \n{CALL[:40]}", ["a", f" \n{CALL[:40]}"]),
        (
            f"a {CALL} b {CALL[:40]}",
            ["a", ("weather", {"city": "Rome", "days": 2}), "b", f" {CALL[:40]}"],
        ),
        # the end mark was a stop word
        (CALL.removesuffix("</tool_call>"), [("weather", {"city": "Rome", "days": 2})]),
        (CALL.replace("Rome", "</tool_call>"), [("weather", {"city": "</tool_call>", "days": 2})]),
        ("  spaces \n", ["  spaces", " \n"]),
        ("", []),
        ("<tool_cal", ["<tool_cal"]),
        (f"{CALL} \n", [("weather", {"city": "Rome", "days": 2})]),
    ],
)
def test_an_incomplete_call_is_text(text, parts):
    check_read(CallReader, text, parts)


def test_the_start_mark_is_always_followed_by_a_call(calling, monkeypatch):
    request = replace_answers(calling, monkeypatch, ["x"])
    chat(calling, parallel_tool_calls=False)
    assert request[0].stop_words == ["</tool_call>"]
    guided = GuidedText(request[0].sampling.guide)
    for free in ("<tool_call x", "a < b", CALL + " and more"):
        assert guided.allows_each_letter(free)
    begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    assert guided.allows(begun)
    for wrong in ('<tool_call>\n{"name": "x', "<tool_call>a", begun[:-1] + "i", begun + "b"):
        assert not guided.allows(wrong)


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
            "tools",
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
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [FUNCTION]}, "functions"),
    ],
)
def test_wrong_tools_are_an_error_with_the_name_of_the_field(calling, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        calling.client.chat.completions.create(
            model="chat", messages=MESSAGES, tools=TOOLS, extra_body=fields
        )
    assert raised.value.param == param


def test_tools_are_rejected_for_templates_of_another_format(serving):
    with pytest.raises(openai.BadRequestError, match="tool_call") as raised:
        chat(serving)
    assert raised.value.param == "tools"
    assert chat(serving, tool_choice="none", max_tokens=3).usage.completion_tokens == 3
