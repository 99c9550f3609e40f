"""Converts conversations of clients (OpenAI's, or the field `messages`) for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slipstream.server.text.chat import ChatError

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Members of OpenAI's answers that have no meaning when sent back.
_EMPTY = ("refusal", "annotations", "audio", "function_call")
# Names of the reasoning of an earlier answer: this server's, and vLLM's newer one.
_REASONING = ("reasoning_content", "reasoning")
_KNOWN = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", *_REASONING, *_EMPTY})


class MessageError(ChatError):
    """An invalid part of a conversation. The text begins with the path of its field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def template_messages(
    messages: Sequence[dict[str, Any]], template: str, name: str = "messages"
) -> list[dict[str, Any]]:
    """Return messages for a template: contents as text, the arguments of calls as objects.

    The role `developer` becomes `system` where the template does not know it.
    """
    if not messages:
        raise MessageError(name, "must hold at least one message")
    return [
        _message(f"{name}[{number}]", message, template) for number, message in enumerate(messages)
    ]


def unknown_fields(messages: Sequence[dict[str, Any]], name: str = "messages") -> list[str]:
    return [
        f"{name}[{number}].{key}"
        for number, message in enumerate(messages)
        for key, value in message.items()
        if value is not None and key not in _KNOWN
    ]


def _message(name: str, given: dict[str, Any], template: str) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    for key in _EMPTY:
        if message.get(key):
            raise MessageError(f"{name}.{key}", "is not supported by this server")
    role = message.get("role")
    if role not in _ROLES:
        raise MessageError(
            f"{name}.role", f"must be one of {', '.join(_ROLES)}, got {json.dumps(role)[:40]}"
        )
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise MessageError(f"{name}.tool_calls", "belongs to messages of the assistant")
    if role == "developer" and "developer" not in template:
        role = "system"
    made = {
        "role": role,
        "content": _content(f"{name}.content", message.get("content"), optional=bool(calls)),
    }
    for key in ("name", "tool_call_id"):
        if key in message:
            made[key] = _text(f"{name}.{key}", message[key])
    if calls:
        made["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    if role == "assistant":
        made |= _reasoning(name, message, bool(calls and made["content"]))
    return made


def _reasoning(name: str, message: dict[str, Any], text_and_calls: bool) -> dict[str, str]:
    """Return the reasoning of an answer under the names that templates use.

    The template of gpt-oss takes `thinking`, unless a message has text and calls.
    """
    for key in _REASONING:
        if message.get(key):
            text = _text(f"{name}.{key}", message[key])
            return {"reasoning_content": text} | ({} if text_and_calls else {"thinking": text})
    return {}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise MessageError(name, "must be a string")
    return value


def _content(name: str, content: Any, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(name, "must be a string or a list of text parts")
    return "\n".join([_part(f"{name}[{number}]", part) for number, part in enumerate(content)])


def _part(name: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise MessageError(name, "must be an object with type and text")
    if part.get("type") != "text":
        raise MessageError(f"{name}.type", f"must be text, got {json.dumps(part.get('type'))[:40]}")
    return _text(f"{name}.text", part.get("text"))


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Return the model's earlier calls, with their arguments as objects for the template."""
    if not isinstance(calls, list):
        raise MessageError(name, "must be a list")
    made = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise MessageError(
                f"{name}[{number}]", "must be an object with type function and the function"
            )
        place = f"{name}[{number}].function"
        arguments = _arguments(f"{place}.arguments", function.get("arguments"))
        function = {"name": _text(f"{place}.name", function.get("name")), "arguments": arguments}
        made.append(
            {
                "id": _text(f"{name}[{number}].id", call.get("id")),
                "type": "function",
                "function": function,
            }
        )
    return made


def _arguments(name: str, text: Any) -> Any:
    try:
        return json.loads(_text(name, text) or "{}")
    except (ValueError, RecursionError) as error:
        raise MessageError(name, "must be JSON") from error
