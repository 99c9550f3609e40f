"""Functions: shown by the model's own template, called in its format, and read back as calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from slipstream.engine.guided import Guides
from slipstream.engine.vocabulary import Vocabulary
from slipstream.server.openai.call_reader import CallReader, ToolCall
from slipstream.server.text.pipeline import TextDelta

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | length }}\n"
    '{% if loop.last %}Call <tool_call>{"name": N, "arguments": A}</tool_call>\n{% endif %}{% endfor %}'
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
WEATHER = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture
def calling(serving, monkeypatch):
    monkeypatch.setattr(serving.generator.tokenizer, "chat_templates", {"default": TEMPLATE})
    return serving


def chat(serving, **fields):
    given = {"model": "chat", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 300, **fields}
    return serving.client.chat.completions.create(**given)


def prompt_ids(serving, messages, tools) -> list[int]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    return tokenizer.apply_chat_template(messages, tools=tools, chat_template=TEMPLATE, add_generation_prompt=True,
                                         return_dict=False)


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


def test_the_template_shows_the_functions_and_the_history(calling):
    answer = chat(calling, tool_choice="auto", max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(calling, MESSAGES, TOOLS))
    assert chat(calling, tool_choice="none", max_tokens=4).usage.prompt_tokens == len(
        prompt_ids(calling, MESSAGES, None))
    called = chat(calling, tool_choice="required", temperature=9, seed=1).choices[0].message
    messages = [*MESSAGES, called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}]
    function = called.tool_calls[0].function
    plain = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": function.name, "arguments": json.loads(function.arguments)}}]}, {"role": "tool", "content": "Sunny."}]
    answer = chat(calling, messages=messages, max_tokens=4)
    assert answer.usage.prompt_tokens == len(prompt_ids(calling, plain, TOOLS))


def test_text_without_a_call_is_what_it_would_be(calling):
    """The guide leaves free text alone, and the end of the stream what was held back."""
    free = calling.client.completions.create(model="chat", prompt=prompt_ids(calling, MESSAGES, TOOLS), temperature=0,
                                             max_tokens=60).choices[0].text
    answer = chat(calling, max_tokens=60).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (free, None, "length")
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(calling, max_tokens=60, stream=True)]
    assert "".join(pieces) == free


def say(serving, monkeypatch, pieces: list[str], reason: str = "stop") -> list[Any]:
    """The model says this from now on; the requests it gets."""
    requests = []

    async def generate(request):
        requests.append(request)
        for number, piece in enumerate(pieces):
            last = reason if number == len(pieces) - 1 else ""
            yield TextDelta(piece, [5], finish_reason=last, prompt_tokens=9)

    monkeypatch.setattr(serving.generator, "generate", generate)
    return requests


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_within_text_are_told_apart_whole_and_streamed(calling, monkeypatch, size):
    said = f"Let me see < a <tool. \n{CALL}\n{CALL.replace('Rome', 'Bonn')} "
    say(calling, monkeypatch, [said[start : start + size] for start in range(0, len(said), size)])
    whole = chat(calling).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("Let me see < a <tool.", "tool_calls")
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls]
    assert calls == [("function", "weather", {"city": city, "days": 2}) for city in ("Rome", "Bonn")]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    chunks = [chunk.choices[0] for chunk in chat(calling, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in streamed] == [0, 1]
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in whole.message.tool_calls]
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(("said", "reason", "parts"), [
    (CALL[:40], "length", [CALL[:40]]),  # cut: no call, and nothing lost
    ("a <tool_call>no JSON</tool_call> b", "stop", ["a", " <tool_call>no JSON</tool_call> b"]),
    (f"a \n{CALL[:40]}", "length", ["a", f" \n{CALL[:40]}"]),
    (f"a {CALL} b {CALL[:40]}", "length", ["a", ("weather", {"city": "Rome", "days": 2}), "b", f" {CALL[:40]}"]),
    (CALL.removesuffix("</tool_call>"), "stop", [("weather", {"city": "Rome", "days": 2})]),  # the end was a stop word
    (CALL.replace("Rome", "</tool_call>"), "stop", [("weather", {"city": "</tool_call>", "days": 2})]),
    ("  spaces \n", "stop", ["  spaces", " \n"]), ("", "stop", []), ("<tool_cal", "stop", ["<tool_cal"]),
    (f"{CALL} \n", "stop", [("weather", {"city": "Rome", "days": 2})]),
])  # fmt: skip
def test_what_is_no_whole_call_is_text(said, reason, parts):
    def told(found: list[Any]) -> list[Any]:
        return [(part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part for part in found]

    assert told(list(CallReader().push(said, last=True))) == parts
    reader = CallReader()
    bits = [part for letter in said for part in reader.push(letter)] + list(reader.push("", last=True))
    assert "".join(part for part in bits if isinstance(part, str)) == "".join(
        part for part in parts if isinstance(part, str))
    assert [part for part in told(bits) if not isinstance(part, str)] == [
        part for part in parts if not isinstance(part, str)]


def test_after_the_mark_nothing_but_a_call_can_follow(calling, monkeypatch):
    request = say(calling, monkeypatch, ["x"])
    chat(calling, parallel_tool_calls=False)
    assert request[0].stop_words == ["</tool_call>"]
    letters = [bytes([code]) for code in range(128)]
    guided = Guides(Vocabulary(letters, frozenset(), False)).open(request[0].sampling.guide, [])

    def allows(text: str) -> bool:
        mask = int.from_bytes(guided.mask(list(text[:-1].encode())), "little")
        return bool(mask >> ord(text[-1]) & 1)

    for free in ("<tool_call x", "a < b", CALL + " and more"):
        assert all(allows(free[: end + 1]) for end in range(len(free)))
    begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    assert allows(begun)
    for wrong in ('<tool_call>\n{"name": "x', "<tool_call>a", begun[:-1] + "i", begun + "b"):
        assert not allows(wrong)


FUNCTION = TOOLS[0]["function"]
ENDLESS = {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}  # nothing satisfies it


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": ["f"]}, "tools[0]"), ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"properties": {"a": {"not": {}}}}}}]},
     "tools"),
    ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": ENDLESS}}], "tool_choice": "required"},
     "tools"),
    ({"tools": TOOLS * 65}, "tools"), ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"functions": [FUNCTION]}, "functions"),
])  # fmt: skip
def test_what_is_wrong_with_functions_is_told_by_its_name(calling, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        calling.client.chat.completions.create(
            model="chat", messages=MESSAGES, tools=TOOLS, extra_body=fields)
    assert raised.value.param == param


def test_a_template_of_another_format_is_refused(serving):
    with pytest.raises(openai.BadRequestError, match="tool_call") as raised:
        chat(serving)
    assert raised.value.param == "tools"
    assert chat(serving, tool_choice="none", max_tokens=3).usage.completion_tokens == 3
