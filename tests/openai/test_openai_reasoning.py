"""Reasoning: separated from the answer, before which it may say anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from call_templates import ANSWERS, HARMONY, HERMES, MISTRAL, MISTRAL_NAMES, PARTS, PLAIN
from called_functions import (
    MESSAGES,
    TOOLS,
    GuidedText,
    called_by,
    chat,
    check_read,
    read_parts,
    replace_answers,
)
from tiny_hf_folder import save_tokenizer
from tokenizers import Tokenizer as TokenizerFile

from slipstream.engine.constraints.guided import Guides
from slipstream.server.models.text_model import find_text_models
from slipstream.server.openai.answers.format import find_answer_format
from slipstream.server.openai.answers.harmony import AnalysisCounter, HarmonyReader, shown_ids
from slipstream.server.openai.answers.parts import PlainReader
from slipstream.server.openai.answers.reasoning import (
    REASONING_FORMATS,
    ReasoningCounter,
    ReasoningReader,
    ReasoningStart,
    find_reasoning,
)
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.tools import call_formats
from slipstream.server.openai.tools.call_reader import CallReader
from slipstream.server.openai.tools.request import read_tools
from slipstream.server.text.chat import ChatOptions
from slipstream.server.text.stream import TextStream
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.text.vocabulary import tokenizer_vocabulary

THINK = REASONING_FORMATS[0]
MAGISTRAL = REASONING_FORMATS[1]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
WEATHER_CALL = ("weather", '{"city": "Rome", "days": 2}')
# Like Qwen3: the answer opens the reasoning, unless the prompt has closed it.
OPENS = HERMES.replace(
    "[{{ message.role }}] ",
    "[{{ message.role }}] {% if message.reasoning_content %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}",
)
OPENS += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
# Like DeepSeek R1: the prompt opens the reasoning.
OPENED = PLAIN + "<think>\n{# content.split('</think>') #}"


@pytest.mark.parametrize(
    ("start", "text", "parts"),
    [
        ("BEFORE", "<think>\nHm. \n</think>\n\nRome.", [{"Hm."}, "Rome."]),
        ("BEFORE", "\n<think>Hm < </thin k> m</think>Rome.", [{"Hm < </thin k> m"}, "Rome."]),
        ("BEFORE", "Rome <think>a</think>.", ["Rome <think>a</think>."]),
        ("BEFORE", "<think>\n\n</think>\n\nRome.", ["Rome."]),
        ("BEFORE", "<thi", ["<thi"]),
        ("BEFORE", "<think>Hm, Rome", [{"Hm, Rome"}]),
        ("BEFORE", "<think>Hm, Rome</thin", [{"Hm, Rome"}]),
        ("BEFORE", "", []),
        ("INSIDE", "\nHm. \n</think>\n\nRome.\n", [{"Hm."}, "Rome.\n"]),
        ("INSIDE", "Hm", [{"Hm"}]),
        ("AFTER", "Hm </think>", ["Hm </think>"]),
        ("AFTER", "<think>Hm</think>", ["<think>Hm</think>"]),
    ],
)
def test_reasoning_is_read_before_the_text(start, text, parts):
    check_read(lambda: ReasoningReader(THINK, ReasoningStart[start], PlainReader()), text, parts)


def test_reasoning_may_have_other_marks():
    def reader() -> ReasoningReader:
        return ReasoningReader(MAGISTRAL, ReasoningStart.BEFORE, PlainReader())

    check_read(reader, "[THINK]Hm.[/THINK]Rome.", [{"Hm."}, "Rome."])


def test_calls_follow_reasoning():
    def reader() -> ReasoningReader:
        return ReasoningReader(THINK, ReasoningStart.BEFORE, CallReader(call_formats.HERMES))

    text = f"<think>I could write {CALL}.</think>\n\nWell.\n{CALL}"
    check_read(reader, text, [{f"I could write {CALL}."}, "Well.", WEATHER_CALL])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ro <| me.<|return|>",
            [{"Hm."}, "Ro <| me."],
        ),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>",
            [{"One.\nTwo."}],
        ),
        (
            "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            + WEATHER_CALL[1]
            + "<|call|>",
            [WEATHER_CALL],
        ),
        ("<|channel|>analysis<|message|>Hm", [{"Hm"}]),
        ("<|channel|>analysis", []),
        ("Rome.", ["Rome."]),
        ("", []),
    ],
)
def test_channels_are_reasoning_text_and_calls(text, parts):
    check_read(HarmonyReader, text, parts)


def test_text_that_continues_a_message_is_streamed():
    reader = HarmonyReader()
    assert [list(reader.push(piece)) for piece in ("t", "ea", "<|", "end|>")] == [
        [],
        ["tea"],
        [],
        [],
    ]


def test_reasoning_is_found_in_the_chat_template():
    assert find_reasoning(OPENS.replace("</think>", "")) is None
    assert find_reasoning(OPENS) is THINK
    assert find_reasoning("{{ '[THINK]' }}…{{ '[/THINK]' }}") is MAGISTRAL


def test_the_server_can_name_the_formats(serving, monkeypatch):
    assert find_reasoning(PLAIN, "qwen3") is THINK
    assert find_reasoning(OPENS, "none") is None
    assert call_formats.find_format(HERMES, "mistral") is call_formats.MISTRAL
    assert call_formats.find_format(MISTRAL_NAMES, "mistral") is call_formats.MISTRAL_NAMES
    called_by(serving, monkeypatch, OPENS)
    options = ChatOptions(tool_call_parser="llama3_json", reasoning_parser="none")
    text = next(iter(find_text_models(serving.registry)))[1]
    monkeypatch.setattr(text, "engine", replace(text.engine, chat=options))
    replace_answers(serving, monkeypatch, ["<think>Hm.</think>"])
    message = chat(serving, tools=[]).choices[0].message
    assert message.content == "<think>Hm.</think>"
    replace_answers(serving, monkeypatch, ['{"name": "now", "parameters": {}}'])
    assert chat(serving).choices[0].message.tool_calls[0].function.name == "now"


def test_reasoning_is_a_field_of_its_own_whole_and_streamed(serving, monkeypatch):
    called_by(serving, monkeypatch, OPENS)
    pieces = ["<thi", "nk>\nH", "m.\n</think>\n", "\nRome", "."]
    replace_answers(serving, monkeypatch, pieces)
    answer = chat(serving, tools=[])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Rome.", "Hm.")
    chunks = list(chat(serving, tools=[], stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == [
        "H",
        "m.",
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Rome."


def test_an_answer_starts_within_reasoning_that_the_prompt_opens(serving, monkeypatch):
    called_by(serving, monkeypatch, OPENED)
    replace_answers(serving, monkeypatch, ["Hm.</think>Rome."])
    message = chat(serving, tools=[]).choices[0].message
    assert (message.content, message.reasoning_content) == ("Rome.", "Hm.")
    replace_answers(serving, monkeypatch, ["Hm."], reason="length")
    choice = chat(serving, tools=[]).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Hm.")
    assert choice.finish_reason == "length"


def test_reasoning_that_is_turned_off_is_not_looked_for(serving, monkeypatch):
    called_by(serving, monkeypatch, OPENS)
    replace_answers(serving, monkeypatch, ["<think>Hm.</think>"])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = chat(serving, tools=[], extra_body=off).choices[0].message
    assert (message.content, "reasoning_content" in message.model_extra) == (
        "<think>Hm.</think>",
        False,
    )


def test_text_of_models_that_do_not_reason_is_unchanged(serving, monkeypatch):
    replace_answers(serving, monkeypatch, ["<think>Hm.</think>Rome."])
    answer = chat(serving, tools=[])
    assert answer.choices[0].message.content == "<think>Hm.</think>Rome."
    assert answer.usage.completion_tokens_details is None


def test_reasoning_of_earlier_answers_reaches_the_template(serving, monkeypatch):
    called_by(serving, monkeypatch, OPENS)
    requests = replace_answers(serving, monkeypatch, ["x"])
    for name in ("reasoning_content", "reasoning"):
        earlier = {"role": "assistant", "content": "Rome.", name: "Hm."}
        raw = serving.client.chat.completions.with_raw_response.create(
            model="chat", messages=[*MESSAGES, earlier, *MESSAGES]
        )
        assert "x-slipstream-ignored-fields" not in raw.headers
        prompt = serving.generator.tokenizer.decode(requests[-1].prompt)
        assert "[assistant] <think>Hm.</think>Rome." in prompt


def test_reasoning_tokens_are_counted(serving, monkeypatch):
    """The tokens of the tiny model are letters. Its answers never close the reasoning."""
    called_by(serving, monkeypatch, OPENED)
    usage = chat(serving, tools=[], max_tokens=9).usage
    assert usage.completion_tokens_details.reasoning_tokens == 9
    tokenizer = serving.generator.tokenizer
    for start, text, count in (
        (ReasoningStart.INSIDE, "Hm.</think>Rome.", len("Hm.</think>")),
        (ReasoningStart.BEFORE, "<think>Hm.</think>Rome.", len("<think>Hm.</think>")),
        (ReasoningStart.BEFORE, "Rome.</think>", 0),
        (ReasoningStart.AFTER, "Hm.</think>Rome.", 0),
    ):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert ReasoningCounter(THINK, start, tokenizer)(tokens) == count


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> Tokenizer:
    """Return a tokenizer in which the marks of gpt-oss and Mistral are special tokens."""
    folder = tmp_path_factory.mktemp("marked")
    save_tokenizer(folder)
    tokenizer = TokenizerFile.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*call_formats.HARMONY.marks, *call_formats.MISTRAL.marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_special_tokens_that_are_marks_are_shown_and_no_others(marked):
    analysis = "<|channel|>analysis<|message|>Hm.<|end|>"
    text = f"{analysis}<|start|>assistant<|channel|>final<|message|>Rome.[ARGS]"
    tokens = marked.encode(text, add_special_tokens=False)
    shown = shown_ids(marked)
    assert len(shown) == len(call_formats.HARMONY.marks)
    stream = TextStream(marked, shown_special_ids=shown)
    assert stream.push(tokens) + stream.finish() == text.removesuffix("[ARGS]")
    assert AnalysisCounter(marked)(tokens) == len("Hm.")
    assert AnalysisCounter(marked)(tokens[:6]) == 0


def test_marks_that_are_special_tokens_are_enforced_and_read(marked, monkeypatch):
    monkeypatch.setattr(marked, "chat_templates", {"default": MISTRAL})
    fields = ChatFields(model="m", messages=MESSAGES, tools=TOOLS)
    answers = find_answer_format(read_tools(fields, marked), marked, [], text_is_guided=False)
    vocabulary = tokenizer_vocabulary(marked, marked.vocab_size)
    guided = Guides(vocabulary).open(answers.guide(None), marked.end_ids)
    tokens = marked.encode(ANSWERS["mistral"], add_special_tokens=False)
    for end, token in enumerate(tokens):
        mask = int.from_bytes(guided.mask(tokens[:end]), "little")
        assert mask >> token & 1
    start = tokens.index(marked.encode("[TOOL_CALLS]", add_special_tokens=False)[0])
    assert guided.revise(tokens[: start + 1], 0).tokens[: start + 3] == tokens[: start + 3]
    stream = TextStream(marked, shown_special_ids=answers.shown_ids)
    assert read_parts(answers.new_reader(), [stream.push(tokens)]) == PARTS["mistral"]


def guide_of(serving, monkeypatch, template, special=(), **fields) -> GuidedText:
    called_by(serving, monkeypatch, template)
    requests = replace_answers(serving, monkeypatch, ["x"])
    chat(serving, **fields)
    return GuidedText(requests[0].sampling.guide, special)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def test_a_schema_applies_after_the_reasoning(serving, monkeypatch):
    guided = guide_of(serving, monkeypatch, OPENED, tools=[], response_format=JSON)
    text = 'What {"b"? \n</thi</think>\n\n'
    assert guided.allows_each_letter(text)
    assert not guided.may_end(text)
    assert guided.complete(text + '{"a": 1}')
    assert not guided.allows(text + '{"b')
    guided = guide_of(serving, monkeypatch, OPENS, tools=[], response_format=JSON)
    assert guided.complete('<think>Hm.</think>{"a": 1}')
    assert guided.complete('{"a": 1}')
    assert not guided.allows("x")
    assert not guided.may_end("<think>Hm.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    guided = guide_of(serving, monkeypatch, OPENS, tools=[], response_format=JSON, extra_body=off)
    assert guided.complete('{"a": 1}')
    assert not guided.allows("<")


@pytest.mark.parametrize(
    "other",
    [{"guided_regex": "a+b"}, {"guided_choice": ["aab"]}, {"guided_grammar": 'start: "aab"'}],
)
def test_any_grammar_applies_after_the_reasoning(serving, monkeypatch, other):
    guided = guide_of(serving, monkeypatch, OPENED, tools=[], extra_body=other)
    assert guided.complete("Hm.</think>aab")
    assert not guided.allows("Hm.</think>b")


def test_calls_are_enforced_after_the_reasoning_and_not_within(serving, monkeypatch):
    guided = guide_of(serving, monkeypatch, OPENS)
    thought = "<think>Maybe <tool_call>? Or not.</think>"
    for free in (thought, "Rome. <think>", f"{thought}\n\nRome.", f"{thought}\n{CALL}", CALL):
        assert guided.allows_each_letter(free), free
    for wrong in ("<tool_call>x", f"{thought}<tool_call>x", f"{thought}\n\nWell. <tool_call>x"):
        assert not guided.allows(wrong)
    assert not guided.may_end("<think>Hm.")
    guided = guide_of(serving, monkeypatch, OPENS, tool_choice="required")
    assert guided.allows_each_letter(f"{thought}\n\n{CALL}")
    assert guided.allows_each_letter(CALL)
    assert not guided.allows(f"{thought}x")


def test_channels_come_before_a_schema_or_a_required_call(serving, monkeypatch):
    """The marks are text in this tokenizer."""
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    guided = guide_of(serving, monkeypatch, HARMONY, tools=[], response_format=JSON)
    assert guided.complete(f'{analysis}{analysis}{final}{{"a": 1}}')
    assert guided.complete(f'{final}{{"a": 1}}')
    assert not guided.allows(f"{analysis}{final}x")
    guided = guide_of(serving, monkeypatch, HARMONY, tools=TOOLS, tool_choice="required")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert guided.complete(analysis + call)
    assert not guided.allows("<|channel|>f")
    replace_answers(serving, monkeypatch, [analysis, final, "Rome."])
    message = chat(serving, tools=[]).choices[0].message
    assert (message.content, message.reasoning_content) == ("Rome.", "Hm.")


def test_reasoning_effort_reaches_the_template(serving, monkeypatch):
    called_by(serving, monkeypatch, HARMONY)
    requests = replace_answers(serving, monkeypatch, ["x"])
    chat(serving, tools=[], reasoning_effort="high")
    assert "Reasoning: high" in serving.generator.tokenizer.decode(requests[0].prompt)
