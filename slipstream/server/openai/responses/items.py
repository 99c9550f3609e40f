"""The items of a conversation in /v1/responses, and their conversion to chat messages.

An item of a request is checked once and written out in full, with an id. The rest of the server
relies on that form: `input_items` lists it, and a later response continues from it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import read_text

Item = Document
# returns a stored item by its id, or None
FindItem = Callable[[str], Item | None]

_MAX_ITEMS = 1 << 15
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_ONLY = "is not supported by this server: its models read text only"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def read_input(given: str | list[Any] | None, find_item: FindItem) -> list[Item]:
    """Return the items of the field `input`."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message_item("input", {"role": "user", "content": given})]
    if len(given) > _MAX_ITEMS:
        raise field_error("input", f"must hold at most {_MAX_ITEMS} items, got {len(given)}")
    return [_item(f"input[{number}]", item, find_item) for number, item in enumerate(given)]


def check_call_ids(history: Iterable[Item], items: Sequence[Item]) -> None:
    """Reject the output of a call that is not in the conversation."""
    known = {item["call_id"] for item in history if item["type"] == "function_call"}
    for number, item in enumerate(items):
        if item["type"] == "function_call":
            known.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in known:
            raise field_error(
                f"input[{number}].call_id",
                f"names no function_call before it, got {item['call_id'][:80]}",
            )


def _item(name: str, given: Any, find_item: FindItem) -> Item:
    if not isinstance(given, dict):
        raise field_error(name, "must be an object, an item")
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference"
    match kind:
        case "message":
            return _message_item(name, given)
        case "function_call":
            return _call_item(name, given)
        case "function_call_output":
            return _call_output_item(name, given)
        case "reasoning":
            return _reasoning_item(name, given)
        case "item_reference":
            return _referenced_item(name, given, find_item)
        case _:
            raise ApiError(
                f"{name}.type {json.dumps(kind)[:60]} is not supported by this server: it takes "
                "message, function_call, function_call_output, reasoning and item_reference",
                f"{name}.type",
            )


def _id(name: str, given: Document, prefix: str) -> str:
    value = given.get("id")
    return new_id(prefix) if value is None else read_text(f"{name}.id", value)


def _message_item(name: str, given: Document) -> Item:
    role = given.get("role")
    if role not in _ROLES:
        raise field_error(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "id": _id(name, given, "msg"),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": _parts(f"{name}.content", given.get("content"), kind),
    }


def _parts(name: str, content: Any, kind: str) -> list[Document]:
    """Return the parts of a message. `kind`: type of its texts."""
    if isinstance(content, str):
        return [_text_part(kind, content)]
    if not isinstance(content, list):
        raise field_error(name, "must be a string or a list of text parts")
    return [_part(f"{name}[{number}]", part, kind) for number, part in enumerate(content)]


def _part(name: str, part: Any, kind: str) -> Document:
    if not isinstance(part, dict):
        raise field_error(name, "must be an object with type and text")
    match part.get("type"):
        case "input_text" | "output_text":
            return _text_part(kind, read_text(f"{name}.text", part.get("text")))
        case "refusal":
            return {"type": "refusal", "refusal": read_text(f"{name}.refusal", part.get("refusal"))}
        case "input_image" | "input_file" | "input_audio" as unsupported:
            raise ApiError(f"{name}.type {unsupported} {_TEXT_ONLY}", f"{name}.type")
        case other:
            raise field_error(
                f"{name}.type", f"must be input_text or output_text, got {json.dumps(other)[:40]}"
            )


def _text_part(kind: str, text: str) -> Document:
    extras: Document = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extras}


def _call_item(name: str, given: Document) -> Item:
    arguments = read_text(f"{name}.arguments", given.get("arguments"))
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise field_error(f"{name}.arguments", "must be JSON") from error
    return {
        "id": _id(name, given, "fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": read_text(f"{name}.call_id", given.get("call_id")),
        "name": read_text(f"{name}.name", given.get("name")),
        "arguments": arguments,
    }


def _call_output_item(name: str, given: Document) -> Item:
    output = given.get("output")
    if not isinstance(output, str):
        output = _parts(f"{name}.output", output, "input_text")
    return {
        "id": _id(name, given, "fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": read_text(f"{name}.call_id", given.get("call_id")),
        "output": output,
    }


def _reasoning_item(name: str, given: Document) -> Item:
    content = _reasoning_texts(f"{name}.content", given.get("content"), "reasoning_text")
    summary = _reasoning_texts(f"{name}.summary", given.get("summary"), "summary_text")
    if given.get("encrypted_content") and not content and not summary:
        raise ApiError(
            f"{name}.encrypted_content cannot be read by this server: send the item's content, "
            "or leave the item out",
            f"{name}.encrypted_content",
        )
    return {
        "id": _id(name, given, "rs"),
        "type": "reasoning",
        "status": "completed",
        "summary": summary,
        "content": content,
    }


def _reasoning_texts(name: str, given: Any, kind: str) -> list[Document]:
    if not isinstance(given or [], list):
        raise field_error(name, "must be a list")
    texts = []
    for number, part in enumerate(given or []):
        if not isinstance(part, dict):
            raise field_error(f"{name}[{number}]", "must be an object with type and text")
        texts.append({"type": kind, "text": read_text(f"{name}[{number}].text", part.get("text"))})
    return texts


def _referenced_item(name: str, given: Document, find_item: FindItem) -> Item:
    identity = read_text(f"{name}.id", given.get("id"))
    found = find_item(identity)
    if found is None:
        raise ApiError(
            f"{name}.id: there is no stored item '{identity[:80]}'. Send the item itself",
            f"{name}.id",
            code="item_not_found",
        )
    return found


# -- chat messages


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Document]:
    """Return the messages of a conversation.

    The items of one answer (its reasoning, text and calls) become one message of the assistant.
    """
    messages: list[Document] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "reasoning":
                text = "".join([part["text"] for part in item["content"] or item["summary"]])
                _answer(messages, item)["reasoning_content"] = text
            case "function_call" if item["status"] == "incomplete":
                continue  # the limit of tokens cut its arguments off
            case "function_call":
                call = {"name": item["name"], "arguments": item["arguments"]}
                _answer(messages, item).setdefault("tool_calls", []).append(
                    {"id": item["call_id"], "type": "function", "function": call}
                )
            case "function_call_output":
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item["call_id"],
                        "content": _content(item["output"]),
                    }
                )
            case "message" if item["role"] == "assistant":
                _answer(messages, item)["content"] = _content(item["content"])
            case _:
                messages.append({"role": item["role"], "content": _content(item["content"])})
    return messages


def _answer(messages: list[Document], item: Item) -> Document:
    """Return the message of the assistant that this item belongs to: the last, or a new one."""
    last = messages[-1] if messages else {}
    taken = {
        "reasoning": ("reasoning_content", "content", "tool_calls"),
        "message": ("content",),
        "function_call": (),
    }[item["type"]]
    if last.get("role") != "assistant" or any(last.get(key) for key in taken):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _content(parts: str | list[Document]) -> str | list[Document]:
    """Return the content of a chat message: a text, or text parts if there are several."""
    if isinstance(parts, str):
        return parts
    texts: list[str] = [
        part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts
    ]
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def without_oldest(messages: Sequence[Document], count: int) -> list[Document]:
    """Return the messages without the oldest `count` of those that may be left out.

    System messages and the last message stay. The output of a call that is left out is, too.
    """
    kept: list[Document] = []
    calls: set[str] = set()  # ids of calls that are kept
    for message in messages:
        fixed = message["role"] in ("system", "developer") or message is messages[-1]
        orphan = message["role"] == "tool" and message["tool_call_id"] not in calls
        if not fixed and (count > 0 or orphan):
            count -= 1
            continue
        kept.append(message)
        calls |= {call["id"] for call in message.get("tool_calls", [])}
    return kept
