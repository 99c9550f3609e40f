"""Functions of models that write a call as their whole answer, without marks: `{"name": "f", "parameters": {…}}`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from slipstream.engine.guided import Guides
from slipstream.engine.vocabulary import Vocabulary
from slipstream.server.openai.call_formats import BARE, MARKED, format_of
from slipstream.server.openai.call_reader import BareCallReader, ToolCall
from slipstream.server.text.pipeline import TextDelta

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ 'Say {\"name\": N, \"parameters\": P}.' }}"
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {% if message.tool_calls %}"
    "{% set call = message.tool_calls[0].function %}{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}' }}{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WEATHER = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'
ARGUMENTS = {"city": "Rome", "days": 2}


@pytest.fixture
def calling(serving, monkeypatch):
    monkeypatch.setattr(serving.generator.tokenizer, "chat_templates", {"default": TEMPLATE})
    return serving


def chat(serving, **fields):
    given = {"model": "chat", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 300, **fields}
    return serving.client.chat.completions.create(**given)


def prompt_ids(serving, messages) -> list[int]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    return tokenizer.apply_chat_template(messages, tools=TOOLS, chat_template=TEMPLATE, add_generation_prompt=True,
                                         return_dict=False)


def say(serving, monkeypatch, pieces: list[str]) -> list[Any]:
    """The model says this from now on; the requests it gets."""
    requests = []

    async def generate(request):
        requests.append(request)
        for number, piece in enumerate(pieces):
            yield TextDelta(piece, [5], finish_reason="stop" if number == len(pieces) - 1 else "", prompt_tokens=9)

    monkeypatch.setattr(serving.generator, "generate", generate)
    return requests


def test_a_format_is_told_by_the_template():
    assert format_of(TEMPLATE) is BARE
    both = "{{ tools }}<tool_call>{\"name\": N, \"arguments\": A}</tool_call> {\"name\": N, \"parameters\": P}"
    assert format_of(both) is MARKED
    assert format_of('{{ tools }}{\\"name\\": N, \\"parameters\\": P}') is BARE
    assert format_of('{{ messages }}{"name": N, "parameters": P}') is None
    assert format_of('{{ tools }}[TOOL_CALLS][{"name": N, "arguments": A}]') is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come_comes_and_obeys_its_schema(calling, choice):
    named = set()
    for seed in range(6):
        answer = chat(calling, tool_choice=choice, temperature=9, seed=seed)
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        (call,) = message.tool_calls
        schema = WEATHER if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        named.add(call.function.name)
    assert named == ({"weather", "now"} if choice == "required" else {"weather"})


def test_a_call_and_its_result_go_back_through_the_template(calling):
    called = chat(calling, tool_choice="required", temperature=9, seed=1).choices[0].message
    function = called.tool_calls[0].function
    messages = [*MESSAGES, called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}]
    plain = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": function.name, "arguments": json.loads(function.arguments)}}]}, {"role": "tool", "content": "Sunny."}]
    answer = chat(calling, messages=messages, max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(calling, plain))


def test_text_without_a_call_is_what_it_would_be(calling):
    free = calling.client.completions.create(model="chat", prompt=prompt_ids(calling, MESSAGES), temperature=0,
                                             max_tokens=60).choices[0].text
    answer = chat(calling, max_tokens=60).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (free, None, "length")
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(calling, max_tokens=60, stream=True)]
    assert "".join(pieces) == free


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_is_read_whole_and_streamed(calling, monkeypatch, size):
    say(calling, monkeypatch, [CALL[start : start + size] for start in range(0, len(CALL), size)])
    answer = chat(calling).choices[0]
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    assert json.loads(answer.message.tool_calls[0].function.arguments) == ARGUMENTS
    chunks = [chunk.choices[0] for chunk in chat(calling, stream=True)]
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "weather", ARGUMENTS)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(("said", "parts"), [
    (CALL, [("weather", ARGUMENTS)]), ("", []),
    *[(text, [text]) for text in (
        "Sunny.", '{"name', CALL[:40], '{"name": 5}', f"I call {CALL}", '{"name": "weather"}',
        '{"name": "f", "parameters": []}',
    )],
])  # fmt: skip
def test_what_is_no_whole_call_is_text(said, parts):
    def told(found: list[Any]) -> list[Any]:
        return [(part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part for part in found]

    assert told(list(BareCallReader().push(said, last=True))) == parts
    reader = BareCallReader()
    bits = told([part for letter in said for part in reader.push(letter)] + list(reader.push("", last=True)))
    assert "".join(part for part in bits if isinstance(part, str)) == "".join(
        part for part in parts if isinstance(part, str))
    assert [part for part in bits if not isinstance(part, str)] == [part for part in parts if not isinstance(part, str)]


def test_text_is_streamed_as_it_comes():
    reader = BareCallReader()
    assert [list(reader.push(piece)) for piece in ("{", '"n', "o", "pe")] == [[], [], ['{"no'], ["pe"]]


def test_what_begins_as_a_call_is_one_and_nothing_follows_it(calling, monkeypatch):
    request = say(calling, monkeypatch, ["x"])
    chat(calling, parallel_tool_calls=False)
    assert request[0].stop_words == []
    letters = [bytes([code]) for code in range(128)]
    guided = Guides(Vocabulary(letters, frozenset(), False)).open(request[0].sampling.guide, [])

    def allows(text: str) -> bool:
        mask = int.from_bytes(guided.mask(list(text[:-1].encode())), "little")
        return bool(mask >> ord(text[-1]) & 1)

    for free in ('{"name": 5}', '{"nam', "a < b", f"I call {CALL} now", '\n{"name": "x"}'):
        assert all(allows(free[: end + 1]) for end in range(len(free))), free
    begun = '{"name": "weather", "parameters": {"city": "Ro'
    assert all(allows(begun[: end + 1]) for end in range(len(begun)))
    for wrong in ('{"name": "x', begun[:-1] + "i", begun + "b"):
        assert not allows(wrong)
    assert guided.complete(list(CALL.encode()))
    assert not guided.complete(list(CALL[:-1].encode()))
