"""Conversations with tools, for chat templates that do not show tools or earlier calls themselves.

The functions are listed in the system message, with an example of a call in the format that the
answer is read in. Earlier calls and their results become text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slipstream.server.openai.tools.call_formats import CallFormat

Message = dict[str, Any]

_INTRODUCTION = (
    "You can call functions to answer the user. These are the functions, each with the JSON schema "
    "of its arguments:"
)
_HOW_TO_CALL = "To call a function, answer with its name and arguments in exactly this form:"
_NO_SYSTEM_ROLE = "System role not supported"
# A template that joins the arguments to other texts needs them as text.
_TEXT_ARGUMENTS = re.compile(
    r"""[+~]\s*[\w.\[\]'"]*(\.arguments|\[['"]arguments['"]\])\s*([+~]|[-+]?[%}]\})"""
)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def describe_tools(tools: Sequence[Mapping[str, Any]], call_format: CallFormat) -> str:
    """Return the text that tells a model which functions it can call, and how."""
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = _write_calls(call_format, [("FUNCTION", '{"ARGUMENT": "VALUE"}')])
    return "\n".join([_INTRODUCTION, *functions, "", _HOW_TO_CALL, example])


def add_instructions(messages: Sequence[Message], text: str, template: str) -> list[Message]:
    """Return the messages with a text in the system message, or else in the first message."""
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".strip()}, *rest]
    if _has_system_role(template):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]


def _has_system_role(template: str) -> bool:
    """Return whether a template takes system messages. One that names no role takes all roles."""
    if _NO_SYSTEM_ROLE in template:
        return False
    return "system" in template or "user" not in template


def adapt_history(
    messages: Sequence[Message], template: str, call_format: CallFormat
) -> list[Message]:
    """Return the messages with earlier calls and their results in the form of the template."""
    if not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return list(messages)
    if "tool_calls" not in template:
        return _calls_as_text(messages, call_format)
    if _TEXT_ARGUMENTS.search(template):
        messages = [_with_calls(message, _text_arguments) for message in messages]
    if call_format.short_ids:
        messages = [_with_short_ids(message) for message in messages]
    return list(messages)


def _calls_as_text(messages: Sequence[Message], call_format: CallFormat) -> list[Message]:
    adapted: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                adapted[-1]["content"] += f"\n{text}"
            else:
                adapted.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            text = _write_calls(call_format, map(_name_and_arguments, calls))
            content = "\n".join([part for part in (message["content"], text) if part])
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            adapted.append({**kept, "content": content})
        else:
            adapted.append(message)
        after_result = is_result
    return adapted


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    return function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def _write_calls(call_format: CallFormat, calls: Iterable[tuple[str, str]]) -> str:
    written = [
        f"{call_format.head}{name}{call_format.middle}{arguments}{call_format.tail}"
        for name, arguments in calls
    ]
    return call_format.open + call_format.between.join(written) + call_format.close


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _text_arguments(call: Message) -> Message:
    name, arguments = _name_and_arguments(call)
    return {**call, "function": {"name": name, "arguments": arguments}}


def _with_short_ids(message: Message) -> Message:
    changed = _with_calls(message, lambda call: {**call, "id": _short_id(call["id"])})
    if "tool_call_id" in changed:
        changed = {**changed, "tool_call_id": _short_id(changed["tool_call_id"])}
    return changed


def _short_id(call_id: str) -> str:
    """Return an id of 9 letters and digits, the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
