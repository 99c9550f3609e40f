"""Tools of models whose call is the whole answer: `{"name": "f", "parameters": {…}}`."""

from __future__ import annotations

import json

import pytest
from called_functions import (
    BARE_TEMPLATE,
    GuidedText,
    called_by,
    chat,
    check_read,
    replace_answers,
    streamed_calls,
)

from slipstream.server.openai.tools.call_formats import BARE, MARKED, find_format
from slipstream.server.openai.tools.call_reader import BareCallReader

CALL = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'
ARGUMENTS = {"city": "Rome", "days": 2}


@pytest.fixture
def calling(serving, monkeypatch):
    return called_by(serving, monkeypatch, BARE_TEMPLATE)


def test_call_format_is_found_in_the_chat_template():
    assert find_format(BARE_TEMPLATE) is BARE
    both = (
        '{{ tools }}<tool_call>{"name": N, "arguments": A}</tool_call> {"name": N, "parameters": P}'
    )
    assert find_format(both) is MARKED
    assert find_format('{{ tools }}{\\"name\\": N, \\"parameters\\": P}') is BARE
    assert find_format('{{ messages }}{"name": N, "parameters": P}') is None
    assert find_format('{{ tools }}[TOOL_CALLS][{"name": N, "arguments": A}]') is None


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_bare_call_is_read_whole_and_streamed(calling, monkeypatch, size):
    replace_answers(
        calling, monkeypatch, [CALL[start : start + size] for start in range(0, len(CALL), size)]
    )
    answer = chat(calling).choices[0]
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    assert json.loads(answer.message.tool_calls[0].function.arguments) == ARGUMENTS
    chunks = [chunk.choices[0] for chunk in chat(calling, stream=True)]
    ((index, name, arguments),) = streamed_calls(chunks)
    assert (index, name, json.loads(arguments)) == (0, "weather", ARGUMENTS)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL, [("weather", ARGUMENTS)]),
        ("", []),
        *[
            (text, [text])
            for text in (
                "Sunny.",
                '{"name',
                CALL[:40],
                '{"name": 5}',
                f"I call {CALL}",
                '{"name": "weather"}',
                '{"name": "f", "parameters": []}',
            )
        ],
    ],
)
def test_an_incomplete_call_is_text(text, parts):
    check_read(BareCallReader, text, parts)


def test_text_without_a_call_is_streamed_immediately():
    reader = BareCallReader()
    assert [list(reader.push(piece)) for piece in ("{", '"n', "o", "pe")] == [
        [],
        [],
        ['{"no'],
        ["pe"],
    ]


def test_the_start_of_a_bare_call_is_completed_and_ends_the_answer(calling, monkeypatch):
    request = replace_answers(calling, monkeypatch, ["x"])
    chat(calling, parallel_tool_calls=False)
    assert request[0].stop_words == []
    guided = GuidedText(request[0].sampling.guide)
    for free in ('{"name": 5}', '{"nam', "a < b", f"I call {CALL} now", '\n{"name": "x"}'):
        assert guided.allows_each_letter(free), free
    begun = '{"name": "weather", "parameters": {"city": "Ro'
    assert guided.allows_each_letter(begun)
    for wrong in ('{"name": "x', begun[:-1] + "i", begun + "b"):
        assert not guided.allows(wrong)
    assert guided.complete(CALL)
    assert not guided.complete(CALL[:-1])
