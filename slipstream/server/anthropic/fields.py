"""The request body of /v1/messages, and its conversion to a chat request.

Fields of other servers, such as `min_p` and `seed`, work as in OpenAI's chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from slipstream.server.anthropic.errors import NO_THREADS
from slipstream.server.anthropic.messages import chat_messages
from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import (
    SHARED_CHAT_FIELDS,
    ChatFields,
    convert_fields,
    decode_object,
    reject_unsupported,
)

# The names of fields in errors about the chat request.
FIELD_NAMES: Sequence[tuple[str, str]] = (
    (r"messages\b.*", "messages"),
    ("continue_final_message", "messages"),
    (r"response_format\.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"stop\b", "stop_sequences"),
)
_MIN_BUDGET = 1024
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NOTHING: Sequence[Any] = ()
_UNSUPPORTED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "container": ("it runs no code", _NOTHING),
    "mcp_servers": ("it connects to no MCP server", ([],)),
    "context_management": (
        "it removes nothing; send fewer messages",
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "compaction": ("it summarizes nothing; send fewer messages", _NOTHING),
    "speed": ("there is one speed", ("standard",)),
    "max_completion_tokens": ("use max_tokens", _NOTHING),
    "stop": ("use stop_sequences", _NOTHING),
    "n": ("there is one answer", (1,)),
    "response_format": ("use output_config.format", _NOTHING),
}


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class CountFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/messages/count_tokens. `cache_control` has no effect."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesFields(CountFields, kw_only=True):
    """The fields of /v1/messages. `metadata` and `service_tier` have no effect."""

    max_tokens: int
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_KNOWN = frozenset((*MessagesFields.__struct_fields__, *SHARED_CHAT_FIELDS, *_UNSUPPORTED))


def read_messages_fields(body: bytes) -> tuple[MessagesFields, ChatFields, list[str]]:
    """Return the checked fields, the request as one of chat, and the names of unknown fields."""
    given = _read_body(body)
    fields = convert_fields(given, MessagesFields)
    _check_sampling(fields)
    chat = _chat_document(fields, given)
    chat["max_tokens"] = fields.max_tokens
    if fields.stop_sequences:
        # The stop sequence in the text shows which one ended it.
        chat |= {"stop": fields.stop_sequences, "include_stop_str_in_output": True}
    unknown = [name for name in given if name not in _KNOWN]
    return fields, convert_fields(chat, ChatFields), unknown


def read_count_fields(body: bytes) -> ChatFields:
    """Return a body of /v1/messages/count_tokens as a chat request."""
    given = _read_body(body)
    return convert_fields(_chat_document(convert_fields(given, CountFields), given), ChatFields)


def _read_body(body: bytes) -> Document:
    given = decode_object(body)
    if "thread" in given:
        # Anthropic's SDK sends the whole conversation after this error.
        raise ApiError(
            "thread is not supported by this server: it keeps no conversations. Send all messages",
            "thread",
            code=NO_THREADS,
        )
    reject_unsupported(given, _UNSUPPORTED)
    return given


def _check_sampling(fields: MessagesFields) -> None:
    if fields.temperature is not None and not 0 <= fields.temperature <= 1:
        raise field_error("temperature", f"must be between 0 and 1, got {fields.temperature}")
    for number, sequence in enumerate(fields.stop_sequences):
        if not sequence.strip():
            raise field_error(f"stop_sequences[{number}]", "must not be empty or white space")
    thinking = fields.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or not _MIN_BUDGET <= budget < fields.max_tokens:
            raise field_error(
                "thinking.budget_tokens", f"must be at least {_MIN_BUDGET} and below max_tokens"
            )


def _chat_document(fields: CountFields, given: Document) -> Document:
    chat = {name: given[name] for name in SHARED_CHAT_FIELDS if name in given}
    if not fields.messages:
        raise field_error("messages", "must hold at least one message")
    messages = chat_messages(fields.system, fields.messages)
    config = fields.output_config or OutputConfig()
    variables = chat.get("chat_template_kwargs") or {}
    chat |= {
        "model": fields.model,
        "messages": messages,
        # The answer continues the last message if that is the assistant's.
        "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        "tools": [_chat_tool(f"tools[{number}]", tool) for number, tool in enumerate(fields.tools)],
        "chat_template_kwargs": {"enable_thinking": _thinks(fields.thinking), **variables},
    }
    if config.format is not None:
        chat["response_format"] = _response_format(config.format)
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if fields.tool_choice is not None:
        chat["tool_choice"] = _chat_tool_choice(fields.tool_choice)
        chat["parallel_tool_calls"] = not fields.tool_choice.disable_parallel_tool_use
    return chat


def _thinks(thinking: Thinking | None) -> bool:
    return thinking is not None and thinking.type != "disabled"


def _response_format(given: Mapping[str, Any]) -> Document:
    if given.get("type") != "json_schema":
        raise field_error("output_config.format.type", "must be json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


def _chat_tool(name: str, tool: Any) -> Document:
    if not isinstance(tool, dict):
        raise field_error(name, "must be an object with name and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise ApiError(
            f"{name}.type: {str(kind)[:40]} is not supported by this server: it runs no tools "
            "itself, and knows those with an input_schema",
            f"{name}.type",
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise field_error(f"{name}.input_schema", "must be an object, the schema of the input")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice) -> str | Document:
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    if choice.name is None:
        raise field_error("tool_choice.name", "is required with type tool")
    return {"type": "function", "function": {"name": choice.name}}
