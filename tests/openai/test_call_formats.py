"""The formats of tool calls: found in chat templates, read from answers and enforced by grammars."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest
from call_templates import ANSWERS, FORMATS, PARTS, PLAIN
from called_functions import MESSAGES, TOOLS, GuidedText, check_read, read_parts

from slipstream.engine.constraints.guided import GuideError, Guides, check_guide
from slipstream.engine.constraints.vocabulary import LongestMatch, Vocabulary
from slipstream.engine.sampling_params import Guide
from slipstream.server.openai.answers.grammar import NO_FRAME, Frame
from slipstream.server.openai.answers.harmony import HarmonyReader
from slipstream.server.openai.answers.parts import CallStart, PartReader
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.tools import call_formats
from slipstream.server.openai.tools.call_formats import CallFormat, find_format
from slipstream.server.openai.tools.call_grammar import CallRules
from slipstream.server.openai.tools.call_reader import CallReader
from slipstream.server.openai.tools.request import read_tools
from slipstream.server.openai.tools.xml_calls import Schemas, XmlCallReader

FUNCTIONS = [tool["function"] for tool in TOOLS]
SCHEMAS = {function["name"]: function.get("parameters", {}) for function in FUNCTIONS}
JSON_FORMATS = [name for name in FORMATS if name not in ("qwen_coder", "harmony")]


def new_reader(call_format: CallFormat, schemas: Schemas = SCHEMAS) -> PartReader:
    if call_format.channels:
        return HarmonyReader()
    return XmlCallReader(call_format, schemas) if call_format.xml else CallReader(call_format)


def test_the_call_format_is_found_in_the_chat_template():
    for call_format, template in FORMATS.values():
        assert find_format(template) is call_format
    assert find_format('{{ tools }}{\\"name\\": N, \\"parameters\\": P}') is call_formats.LLAMA
    assert find_format('{{ messages }}{"name": N, "parameters": P}') is None


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_the_same_whole_and_letter_by_letter(name):
    call_format, _ = FORMATS[name]
    check_read(lambda: new_reader(call_format), ANSWERS[name], PARTS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_sent_while_they_arrive(name):
    reader = new_reader(FORMATS[name][0])
    sent = [bool(list(reader.push(letter))) for letter in ANSWERS[name]]
    start = ANSWERS[name].rindex("Rome")
    assert sent[start + 1 : start + 4] == [True] * 3


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_off_keeps_its_calls_and_leaves_no_marks(name):
    """Every beginning of the answer gives a beginning of its parts."""
    call_format, _ = FORMATS[name]
    whole = [part for part in PARTS[name] if isinstance(part, tuple)]
    for end in range(len(ANSWERS[name])):
        cut = ANSWERS[name][:end]
        parts = read_parts(new_reader(call_format), [cut])
        text = "".join(part for part in parts if isinstance(part, str))
        # A few letters may be text as well as the beginning of a mark.
        most = len(call_format.trigger) // (1 if call_format.whole_answer else 2)
        assert text in "Let me see." or len(text.removeprefix("Let me see.").strip()) <= most, cut
        calls = [part for part in parts if isinstance(part, tuple)]
        for found, expected in zip(calls, whole, strict=False):
            assert found[0] == expected[0]
            assert expected[1].startswith(found[1]), cut
    cut = ANSWERS[name][: ANSWERS[name].rindex("Rome") + 2]
    assert read_parts(new_reader(call_format), [cut])[-1] == ("weather", '{"city": "Ro')


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_allows_the_answer_and_enforces_its_calls(name, special):
    """The marks are text in some tokenizers and special tokens in others."""
    call_format, _ = FORMATS[name]
    marks = list(call_format.marks) if special or call_format.channels else []
    ids = {mark: 256 + number for number, mark in enumerate(marks)}
    frame = channel_frame_of(ids) if call_format.channels else replace(NO_FRAME, ids=ids)
    rules = CallRules(call_format, FUNCTIONS, required=False, many=call_format.many)
    guide = rules.guide(frame, None)
    check_guide(guide)
    guided = GuidedText(guide, marks)
    answer = ANSWERS[name]
    if name == "mistral_with_ids" and not special:
        answer = answer.replace("[CALL_ID]a1B2c3D4e", "")
    assert guided.allows_each_letter(answer)
    assert guided.may_end(answer)
    before = answer[: answer.rindex("Rome")]
    assert guided.allows(before + "R")
    assert not guided.allows(before + "P")
    assert not guided.may_end(before)
    wrong = answer[: answer.index("weather")] + "x"
    assert not guided.allows(wrong)
    text = "<|channel|>final<|message|>a < b" if call_format.channels else "a < b [T { <tool_"
    assert guided.allows_each_letter(text)
    assert guided.may_end(text)


def channel_frame_of(ids: dict[str, int]) -> Frame:
    from slipstream.server.openai.answers.harmony import channel_frame

    class Tokens:
        special_ids = frozenset(ids.values())

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ids[text]] if text in ids else [0, 0]

    return channel_frame(Tokens())  # type: ignore[arg-type]


MIXED = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "l": {"type": "array", "items": {"enum": ['a"b', "<tool_call>"]}, "maxItems": 2},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["s", "l"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_random_answers_of_the_grammar_are_read_as_calls_that_match_their_schema(name):
    call_format, _ = FORMATS[name]
    functions = [{"name": "f", "parameters": MIXED}, {"name": "f_g"}]
    schemas = {"f": MIXED, "f_g": {"type": "object", "maxProperties": 0}}
    marks = list(call_format.marks)
    ids = {mark: 256 + number for number, mark in enumerate(marks)}
    frame = channel_frame_of(ids) if call_format.channels else replace(NO_FRAME, ids=ids)
    rules = CallRules(call_format, functions, required=True, many=call_format.many)
    guided = GuidedText(rules.guide(frame, None), marks)
    rng = random.Random(1)
    for _ in range(4):
        text = guided.random_text(rng, most=300)
        readers = [new_reader(call_format, schemas) for _ in range(2)]
        parts = read_parts(readers[0], [text])
        assert parts == read_parts(readers[1], list(text))
        calls = [part for part in parts if isinstance(part, tuple)]
        complete = calls if guided.may_end(text) else calls[:-1]
        for function, arguments in complete:
            jsonschema.validate(json.loads(arguments), schemas[function])


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_required_calls_are_one_or_many(name):
    call_format, _ = FORMATS[name]
    answer = ANSWERS[name].removeprefix("Let me see.").lstrip()
    one = GuidedText(CallRules(call_format, FUNCTIONS, True, False).guide(NO_FRAME, None))
    many = GuidedText(
        CallRules(call_format, FUNCTIONS, True, call_format.many).guide(NO_FRAME, None)
    )
    if name == "mistral_with_ids":
        answer = answer.replace("[CALL_ID]a1B2c3D4e", "")
    assert not one.allows("x")
    assert not one.may_end("")
    assert many.allows_each_letter(answer)
    assert many.may_end(answer)
    if not call_format.many:
        return
    assert not one.allows_each_letter(answer)
    single = answer[: answer.index("2}") + 2] + call_format.tail + call_format.close
    assert one.allows_each_letter(single)
    assert one.complete(single)


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_the_text_beside_tools_may_have_a_grammar(name):
    call_format, _ = FORMATS[name]
    response = Guide(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}},
            }
        ),
    )
    guided = GuidedText(CallRules(call_format, FUNCTIONS, False, True).guide(NO_FRAME, response))
    assert not guided.allows("x")
    assert guided.allows_each_letter('{"name": "Bob"}')
    assert guided.complete('{"name": "Bob"}')
    call = ANSWERS[name].removeprefix("Let me see.").lstrip()
    assert guided.allows_each_letter(call)
    spaced = '{ "name" :"weather","parameters": {"city": "Rome","days": 2}}'
    if name == "llama":
        assert guided.complete(spaced)
        check_read(
            lambda: CallReader(call_format, any_layout=True),
            spaced,
            [("weather", '{"city": "Rome","days": 2}')],
        )
    required = GuidedText(CallRules(call_format, FUNCTIONS, True, True).guide(NO_FRAME, response))
    assert required.allows_each_letter(call)
    assert not required.allows_each_letter('{"name": "Bob"}')


def test_a_schema_that_cannot_be_enforced_exactly_is_an_error():
    counted = {"name": "f", "parameters": {"type": "object", "minProperties": 3}}
    with pytest.raises(GuideError, match="minProperties"):
        CallRules(call_formats.HERMES, [counted], True, True).guide(NO_FRAME, None)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": {"a": {"type": "string"}}, "required": 5},
        {"properties": {"a": {"type": ["string", {}]}}},
        {"properties": {"a": {"type": {"b": 1}}}},
        {"properties": {"a": {"anyOf": [5]}}},
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen_coder"])
def test_a_wrong_schema_is_an_error_in_every_format(name, schema):
    rules = CallRules(FORMATS[name][0], [{"name": "f", "parameters": schema}], True, True)
    with pytest.raises(GuideError):
        check_guide(rules.guide(NO_FRAME, None))


def test_a_schema_that_nests_too_deeply_is_an_error():
    schema: dict[str, object] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    rules = CallRules(call_formats.HERMES, [{"name": "f", "parameters": schema}], True, True)
    with pytest.raises(GuideError, match="nests too deeply"):
        rules.guide(NO_FRAME, None)


def test_tools_that_nest_too_deeply_to_be_described_are_an_error():
    schema: dict[str, object] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": schema}}}
    fields = ChatFields(model="chat", messages=MESSAGES, tools=[tool])
    with pytest.raises(ApiError, match="nests too deeply"):
        read_tools(fields, SimpleNamespace(chat_templates={"default": PLAIN}))


def test_arguments_that_a_schema_does_not_list_are_not_generated():
    inner = {"type": "object", "properties": {"properties": {"const": 1}}}
    for openness, allowed in (({}, False), ({"additionalProperties": True}, True)):
        schema = {"properties": {"a": {**inner, **openness}}, "required": ["a"]}
        rules = CallRules(call_formats.HERMES, [{"name": "f", "parameters": schema}], True, False)
        guided = GuidedText(rules.guide(NO_FRAME, None))
        start = '<tool_call>\n{"name": "f", "arguments": {"a": {'
        assert guided.allows_each_letter(start + '"properties": 1')
        for name in ("x", "additionalProperties"):
            assert guided.allows_each_letter(f'{start}"{name}"') == allowed
        assert not guided.allows(start + '"properties": 1}, ')


def test_mistral_ids_have_nine_letters_and_digits():
    parts = CallReader(call_formats.MISTRAL).push(ANSWERS["mistral"], last=True)
    ids = [part.id for part in parts if isinstance(part, CallStart)]
    assert [(len(call_id), call_id.isalnum()) for call_id in ids] == [(9, True), (9, True)]
    given = next(
        part
        for part in CallReader(call_formats.MISTRAL_WITH_IDS).push(ANSWERS["mistral_with_ids"])
        if isinstance(part, CallStart)
    )
    assert given.id == "a1B2c3D4e"


VALUES = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"type": "number"},
        "flags": {"type": "array", "items": {"type": "boolean"}},
        "kind": {"$ref": "#/$defs/kind"},
        "any": {},
    },
    "$defs": {"kind": {"enum": ["a", 1]}},
}


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("text", 'a "b"\n\\ <c> é', 'a "b"\n\\ <c> é'),
        ("text", "12", "12"),
        ("text", "", ""),
        ("maybe", "null", None),
        ("maybe", "12", "12"),
        ("number", "12", 12),
        ("flags", "[true, false]", [True, False]),
        ("kind", '"a"', "a"),
        ("any", "12", 12),
        ("any", "twelve", "twelve"),
        ("unknown", "twelve", "twelve"),
    ],
)
def test_values_of_xml_parameters_have_the_type_of_their_schema(parameter, written, value):
    answer = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    ((name, arguments),) = read_parts(
        XmlCallReader(call_formats.QWEN_CODER, {"f": VALUES}), list(answer)
    )
    assert (name, json.loads(arguments)) == ("f", {parameter: value})
    if parameter == "unknown":
        return
    rules = CallRules(call_formats.QWEN_CODER, [{"name": "f", "parameters": VALUES}], True, False)
    guided = GuidedText(rules.guide(NO_FRAME, None))
    assert guided.allows_each_letter(answer)
    assert guided.complete(answer)


def test_special_tokens_stay_where_forced_text_is_tokenised_again():
    texts = [*[bytes([code]) for code in range(256)], b"now", b"[TOOL_CALLS]", b"[ARGS]", b"{}"]
    encode = LongestMatch(Vocabulary(texts, frozenset({257, 258}))).encode
    vocabulary = Vocabulary(texts, frozenset({257, 258}), False, lambda text: encode(text.encode()))
    frame = replace(NO_FRAME, ids={"[TOOL_CALLS]": 257, "[ARGS]": 258})
    rules = CallRules(call_formats.MISTRAL_NAMES, [{"name": "now"}], required=False, many=False)
    guided = Guides(vocabulary).open(rules.guide(frame, None), [])
    revised = guided.revise([*b"Hm", 257], 0).tokens
    assert revised == [*b"Hm", 257, 256, 258]
    assert guided.revise([*b"Hm", 257, *b"now"], 0).tokens == revised
