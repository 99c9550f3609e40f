"""The formats of tool calls. A model's chat template shows which one it uses.

The parts of a call, in the formats of Hermes and of Mistral:

    <tool_call>{"name": "    f     ", "arguments":    {…}         }</tool_call>
    head                     name  middle             arguments   tail

    [TOOL_CALLS][   {"name": "   f     ", "arguments":   {…}         }      ,         ]
    open            head         name  middle            arguments   tail   between   close
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class CallFormat:
    name: str  # vLLM's name of the format
    shown: Sequence[str]  # texts of the chat templates that use this format
    head: str  # text of a call before the function's name
    middle: str  # text between the name and the arguments
    tail: str  # text after the arguments
    open: str = ""  # text before the first call
    between: str = ""  # text between two calls
    close: str = ""  # text after the last call
    marks: Sequence[str] = ()  # parts of the texts above that may be special tokens
    many: bool = True  # an answer may have several calls
    whole_answer: bool = False  # there is no text around a call
    prefix: str = ""  # mark that may come before a call that is the whole answer
    call_id: str = ""  # mark of the call's id, which may follow the name
    short_ids: bool = False  # the chat template takes ids of 9 letters and digits only
    xml: bool = False  # arguments are XML elements, otherwise JSON
    channels: bool = False  # text, reasoning and calls are messages on channels

    @property
    def trigger(self) -> str:
        """The text that starts a call."""
        if self.whole_answer:
            return self.head
        start = self.open or self.head
        return next(mark for mark in self.marks if start.startswith(mark))


_NAME = '{"name": "'
_ARGUMENTS = '", "arguments": '
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_TOOL_CALL_MARKS = ("<tool_call>", "</tool_call>")

HARMONY = CallFormat(
    name="openai",
    shown=("<|channel|>", "<|message|>", "functions."),
    head="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    tail="",
    marks=("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
    many=False,
    whole_answer=True,
    channels=True,
)
QWEN_CODER = CallFormat(
    name="qwen3_coder",
    shown=("<tool_call>", "<function=", "<parameter="),
    head="<tool_call>\n<function=",
    middle=">\n",
    tail="</function>\n</tool_call>",
    between="\n",
    marks=_TOOL_CALL_MARKS,
    xml=True,
)
DEEPSEEK_V3 = CallFormat(
    name="deepseek_v3",
    shown=("<｜tool▁calls▁begin｜>", "```json"),
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    open="<｜tool▁calls▁begin｜>",
    between="\n",
    close="<｜tool▁calls▁end｜>",
    marks=_DEEPSEEK_MARKS,
)
DEEPSEEK_V31 = CallFormat(
    name="deepseek_v31",
    shown=("<｜tool▁calls▁begin｜>",),
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    marks=_DEEPSEEK_MARKS,
)
MISTRAL_WITH_IDS = CallFormat(
    name="mistral",
    shown=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    marks=_MISTRAL_MARKS,
    call_id="[CALL_ID]",
    short_ids=True,
)
MISTRAL_NAMES = CallFormat(
    name="mistral",
    shown=("[TOOL_CALLS]", "[ARGS]"),
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    marks=_MISTRAL_MARKS,
    short_ids=True,
)
MISTRAL_SPACED = CallFormat(
    name="mistral",
    shown=("[TOOL_CALLS] [",),
    head=_NAME,
    middle=_ARGUMENTS,
    tail="}",
    open="[TOOL_CALLS] [",
    between=", ",
    close="]",
    marks=_MISTRAL_MARKS,
    short_ids=True,
)
MISTRAL = CallFormat(
    name="mistral",
    shown=("[TOOL_CALLS]",),
    head=_NAME,
    middle=_ARGUMENTS,
    tail="}",
    open="[TOOL_CALLS][",
    between=", ",
    close="]",
    marks=_MISTRAL_MARKS,
    short_ids=True,
)
HERMES = CallFormat(
    name="hermes",
    shown=("tools", "<tool_call>", '"name"', '"arguments"'),
    head=f"<tool_call>\n{_NAME}",
    middle=_ARGUMENTS,
    tail="}\n</tool_call>",
    between="\n",
    marks=_TOOL_CALL_MARKS,
)
LLAMA = CallFormat(
    name="llama3_json",
    shown=("tools", '{"name": ', '"parameters": '),
    head=_NAME,
    middle='", "parameters": ',
    tail="}",
    marks=("<|python_tag|>",),
    many=False,
    whole_answer=True,
    prefix="<|python_tag|>",
)

# A template may match several formats. The first one counts.
CALL_FORMATS = (
    HARMONY,
    QWEN_CODER,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MISTRAL_WITH_IDS,
    MISTRAL_NAMES,
    MISTRAL_SPACED,
    MISTRAL,
    HERMES,
    LLAMA,
)


@lru_cache
def find_format(template: str, name: str = "") -> CallFormat | None:
    """Return the format of calls that a chat template shows, or None if it shows none of them.

    With a name, return the format of this name, even if the template does not show it.
    """
    plain = template.replace('\\"', '"')
    formats = [one for one in CALL_FORMATS if not name or one.name == name]
    for call_format in formats:
        if all(text in plain for text in call_format.shown):
            return call_format
    return formats[-1] if name else None
