"""The request body of /v1/responses, its conversion to a chat request, and its echo in a response.

Fields of other servers that do not conflict with OpenAI's, such as `top_k` and `seed`, work as in
chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import (
    SHARED_CHAT_FIELDS,
    ChatFields,
    check_metadata,
    convert_fields,
    decode_object,
    reject_unsupported,
)
from slipstream.server.openai.sampling import read_max_tokens

LOG_PROBS = "message.output_text.logprobs"
# Values of `include` that are accepted. All but LOG_PROBS are about items that never occur here;
# reasoning items have their text, so they need no encrypted copy of it.
_INCLUDABLE = (
    LOG_PROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

# Fields of other servers, read as in chat completions.
_CHAT_FIELDS = (*SHARED_CHAT_FIELDS, "stop", "include_stop_str_in_output")
# The names of fields in errors about the chat request.
FIELD_NAMES: Sequence[tuple[str, str]] = (
    (r"messages\b.*", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.allowed_tools", "tool_choice"),
    ("logprobs", "include"),
)
_NOTHING: Sequence[Any] = ()
_UNSUPPORTED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "conversation": ("it keeps no conversation objects; use previous_response_id", _NOTHING),
    "prompt": ("it has no stored prompts; use instructions and input", _NOTHING),
    "context_management": ("it compacts nothing; use truncation", ([],)),
    "moderation": ("it has no moderation model", _NOTHING),
    "service_tier": ("there is one tier", ("auto", "default")),
    "prompt_cache_retention": (
        "the engine decides what stays in the cache",
        ("in_memory", "in-memory"),
    ),
    "messages": ("use input", _NOTHING),
    "max_tokens": ("use max_output_tokens", _NOTHING),
    "max_completion_tokens": ("use max_output_tokens", _NOTHING),
    "n": ("a response has one answer", (1,)),
    "response_format": ("use text.format", _NOTHING),
    "reasoning_effort": ("use reasoning.effort", _NOTHING),
    "logprobs": (f"put {LOG_PROBS} into include", (False,)),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # older name of summary


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseFields(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: list[str] = msgspec.field(default_factory=list)
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # limits built-in tools, so it has no effect here
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = msgspec.field(default_factory=ReasoningOptions)
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def wants_log_probs(self) -> bool:
        return LOG_PROBS in self.include or self.top_logprobs > 0

    @property
    def wants_summary(self) -> bool:
        return bool(self.reasoning.summary or self.reasoning.generate_summary)


_KNOWN = frozenset((*ResponseFields.__struct_fields__, *_CHAT_FIELDS, *_UNSUPPORTED))


def read_response_fields(body: bytes) -> tuple[ResponseFields, Document]:
    """Return the checked fields of a request body, and the body as it was sent."""
    given = decode_object(body)
    reject_unsupported(given, _UNSUPPORTED)
    fields = convert_fields(given, ResponseFields)
    if fields.input is None and fields.previous_response_id is None:
        raise field_error("input", "is required")
    _check_options(fields)
    check_metadata(fields.metadata)
    return fields, given


def unknown_names(given: Document) -> list[str]:
    return [name for name in given if name not in _KNOWN]


def _check_options(fields: ResponseFields) -> None:
    for number, name in enumerate(fields.include):
        if name not in _INCLUDABLE:
            raise field_error(f"include[{number}]", f"must be one of {', '.join(_INCLUDABLE)}")
    if fields.max_output_tokens is not None:
        read_max_tokens("max_output_tokens", fields.max_output_tokens)
    if fields.max_tool_calls is not None and fields.max_tool_calls < 1:
        raise field_error("max_tool_calls", "must be at least 1")
    if fields.text.verbosity not in (None, "medium"):
        raise ApiError(
            "text.verbosity is not supported by this server: models have no such setting",
            "text.verbosity",
        )
    if fields.stream_options is not None:
        if not fields.stream:
            raise field_error("stream_options", "needs stream to be true")
        if fields.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise ApiError(f"{name} is not supported by this server: it pads no events", name)
    if fields.background and not fields.store:
        raise field_error("background", "needs store to be true: its response is read later")
    if fields.background and fields.stream:
        raise field_error("background", "cannot be combined with stream: poll the response instead")


def chat_fields(
    fields: ResponseFields, given: Document, messages: Sequence[Document]
) -> ChatFields:
    """Return the request as one of chat completions."""
    chat = {name: given[name] for name in _CHAT_FIELDS if name in given}
    chat |= {
        "model": fields.model,
        "messages": messages,
        "max_completion_tokens": fields.max_output_tokens,
        "logprobs": fields.wants_log_probs,
        "top_logprobs": fields.top_logprobs,
        "response_format": _response_format(fields.text.format),
        "tools": [_chat_tool(f"tools[{number}]", tool) for number, tool in enumerate(fields.tools)],
        "tool_choice": _chat_tool_choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "reasoning_effort": fields.reasoning.effort,
    }
    return convert_fields(
        {name: value for name, value in chat.items() if value is not None}, ChatFields
    )


def _response_format(given: Mapping[str, Any] | None) -> Document | None:
    """Return `text.format` in the shape of chat completions, which holds the schema deeper."""
    if given is None or given.get("type") != "json_schema":
        return None if given is None else dict(given)
    if not isinstance(given.get("name"), str):
        raise field_error("text.format.name", "is required: the name of the schema")
    inner = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}


def _chat_tool(name: str, tool: Any) -> Document:
    """Return a tool in the shape of chat completions, which holds the function deeper."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise field_error(name, "must be an object with type function and the function's name")
    if kind != "function":
        raise ApiError(
            f"{name}.type {kind[:40]} is not supported by this server: it runs no tools itself. "
            "Use type function",
            f"{name}.type",
        )
    if "function" in tool:
        raise field_error(
            f"{name}.function", "belongs to chat completions: put name and parameters beside type"
        )
    kept = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in kept if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            return {"type": "allowed_tools", "allowed_tools": _allowed_tools(choice)}
        case kind:
            raise field_error(
                "tool_choice.type",
                f"must be function or allowed_tools, got {msgspec.json.encode(kind).decode()[:40]}",
            )


def _allowed_tools(choice: Mapping[str, Any]) -> Document:
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise field_error("tool_choice.tools", "must be a list of tools")
    named = [_chat_tool(f"tool_choice.tools[{number}]", tool) for number, tool in enumerate(tools)]
    return {"mode": choice.get("mode"), "tools": named}


def echo_fields(fields: ResponseFields) -> Document:
    """Return the fields of a request that its response repeats, with their defaults."""
    text_format = fields.text.format or {"type": "text"}
    return {
        "background": fields.background,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": fields.reasoning.effort,
            "summary": fields.reasoning.summary or fields.reasoning.generate_summary,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store,
        "temperature": fields.temperature,
        "text": {"format": text_format, "verbosity": fields.text.verbosity or "medium"},
        "tool_choice": fields.tool_choice,
        # A call always matches its schema, which is what `strict` means.
        "tools": [
            {"description": None, "parameters": None, "strict": True, **tool}
            for tool in fields.tools
        ],
        "top_logprobs": fields.top_logprobs,
        "top_p": fields.top_p,
        "truncation": fields.truncation,
        "user": fields.user,
    }
