"""Converts the messages of /v1/messages, which hold blocks, to chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import read_text

_MAX_MESSAGES = 100_000  # as in Anthropic's API
_ROLES = ("user", "assistant", "system")
_NOT_TEXT = "is not supported by this server: its models read text only"


def chat_messages(system: Any, messages: Sequence[Any]) -> list[Document]:
    """Return the messages for a chat template. Turns of the same role are joined."""
    if len(messages) > _MAX_MESSAGES:
        raise field_error(
            "messages", f"must hold at most {_MAX_MESSAGES} messages, got {len(messages)}"
        )
    made: list[Document] = []
    calls: set[str] = set()  # ids of the tool_use blocks so far
    if system:
        made.append({"role": "system", "content": _texts("system", system)})
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise field_error(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
        content = message.get("content")
        match message["role"]:
            case "system":
                made.append({"role": "system", "content": _texts(f"{name}.content", content)})
            case "user":
                _add_user_message(f"{name}.content", content, made, calls)
            case "assistant":
                _add_answer(f"{name}.content", content, made, calls)
    if made and made[-1].get("tool_calls"):
        raise field_error(
            f"messages[{len(messages) - 1}]",
            "has tool_use blocks without results: send a message with their tool_result blocks",
        )
    return made


def _add_user_message(name: str, content: Any, messages: list[Document], calls: set[str]) -> None:
    for place, block in _blocks(name, content):
        match block["type"]:
            case "text":
                _last(messages, "user")["content"].append(_text_part(place, block))
            case "tool_result":
                messages.append(_tool_message(place, block, calls))
            case kind:
                raise _unsupported(place, kind)


def _add_answer(name: str, content: Any, messages: list[Document], calls: set[str]) -> None:
    for place, block in _blocks(name, content):
        message = _last(messages, "assistant")
        match block["type"]:
            case "text":
                message["content"].append(_text_part(place, block))
            case "thinking":
                thinking = read_text(f"{place}.thinking", block.get("thinking"))
                message["reasoning_content"] = message.get("reasoning_content", "") + thinking
            case "tool_use":
                call = _call(place, block)
                calls.add(call["id"])
                message.setdefault("tool_calls", []).append(call)
            case kind:
                raise _unsupported(place, kind)


def _blocks(name: str, content: Any) -> list[tuple[str, Document]]:
    """Return the blocks of a message with their places."""
    if isinstance(content, str):
        return [(name, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise field_error(name, "must be a string or a list of blocks")
    blocks = []
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise field_error(f"{name}[{number}]", "must be an object with a type")
        blocks.append((f"{name}[{number}]", block))
    return blocks


def _last(messages: list[Document], role: str) -> Document:
    """Return the last message, or a new one if it has another role."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _text_part(name: str, block: Mapping[str, Any]) -> Document:
    return {"type": "text", "text": read_text(f"{name}.text", block.get("text"))}


def _texts(name: str, content: Any) -> list[Document]:
    """Return the parts of a content that may hold text only."""
    parts = []
    for place, block in _blocks(name, content):
        if block["type"] != "text":
            raise _unsupported(place, block["type"])
        parts.append(_text_part(place, block))
    return parts


def _tool_message(name: str, block: Mapping[str, Any], calls: set[str]) -> Document:
    identity = read_text(f"{name}.tool_use_id", block.get("tool_use_id"))
    if identity not in calls:
        raise field_error(
            f"{name}.tool_use_id", f"names no tool_use block before it, got {identity[:80]}"
        )
    content = block.get("content")
    parts = [] if content is None else _texts(f"{name}.content", content)
    return {"role": "tool", "tool_call_id": identity, "content": parts}


def _call(name: str, block: Mapping[str, Any]) -> Document:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise field_error(f"{name}.input", "must be an object, the arguments")
    function = {
        "name": read_text(f"{name}.name", block.get("name")),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {
        "id": read_text(f"{name}.id", block.get("id")),
        "type": "function",
        "function": function,
    }


def _unsupported(name: str, kind: str) -> ApiError:
    place = f"{name}.type"
    if kind == "redacted_thinking":
        return ApiError(f"{place}: redacted_thinking cannot be read. Leave the block out", place)
    return ApiError(f"{place}: {kind[:40]} {_NOT_TEXT}", place)
