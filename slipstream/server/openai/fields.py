"""Request bodies of the OpenAI API: their fields, and the checks that need no model.

Unsupported OpenAI fields are rejected unless set to their no-op value; so are fields of the other
endpoint. Fields of other servers are supported if the engine has the same feature, and otherwise
rejected. Unknown fields are ignored and listed in a response header. `null` means not given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from slipstream.request_fields.field import PYTHON_TYPES
from slipstream.request_fields.table import COPIED
from slipstream.server.kserve.long_json import TooManyElements, decode_json
from slipstream.server.openai.errors import ApiError, field_error

_PLACE = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<place>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_NOT_IN_A_HEADER = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_MAX_LISTED = 32
_MAX_CONVERTED = 4096  # messages that are checked and copied at once
_MAX_PROBLEM = 300  # characters; a problem may quote the value


_MAX_METADATA = 16  # pairs, with OpenAI's bounds of their lengths
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the answer: one of the first six fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    # The following choose between backends of other servers.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


if TYPE_CHECKING:
    _SamplingFields = msgspec.Struct
else:
    # The sampling parameters of the table. `Fields` declares those again that code names.
    _SamplingFields = msgspec.defstruct(
        "_SamplingFields",
        [
            (field.openai, PYTHON_TYPES[field.datatype] | None, None)
            for field in COPIED
            if field.openai
        ],
        kw_only=True,
    )


class Fields(_SamplingFields, kw_only=True):
    """The fields that both endpoints have.

    `user`, `safety_identifier`, `prompt_cache_key`, `metadata`, `store` and
    `spaces_between_special_tokens` are accepted and have no effect.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    response_format: dict[str, Any] | None = None
    # The following are not OpenAI's, but fields of other servers.
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatFields(Fields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None


class CompletionFields(Fields, kw_only=True):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


# Fields of other servers that every chat endpoint takes, also those with formats of their own.
SHARED_CHAT_FIELDS = (
    *[field.openai for field in COPIED if field.openai not in ("", "max_tokens")],
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "cache_salt",
    "priority",
    "chat_template_kwargs",
    "documents",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

_TOOLS = "use tools and tool_choice"
_TEXT_ONLY = "it generates text only"


class _Unsupported(NamedTuple):
    reason: str
    no_op: Sequence[Any] = ()  # values that are accepted because they have no effect


_UNSUPPORTED: Mapping[str, _Unsupported] = {
    "functions": _Unsupported(_TOOLS, ([],)),
    "function_call": _Unsupported(_TOOLS, ("none",)),
    "modalities": _Unsupported(_TEXT_ONLY, (["text"],)),
    "audio": _Unsupported(_TEXT_ONLY),
    "prediction": _Unsupported("it takes no draft tokens on this route"),
    "verbosity": _Unsupported("models have no such setting", ("medium",)),
    "web_search_options": _Unsupported("it fetches nothing"),
    "prompt_cache_retention": _Unsupported(
        "the engine decides what stays in the cache", ("in_memory", "in-memory")
    ),
    "service_tier": _Unsupported("there is one tier", ("auto", "default")),
    "suffix": _Unsupported("it continues the prompt and fills no gaps", ("",)),
    "chat_template": _Unsupported("a template comes with its model, never with a request"),
    "use_beam_search": _Unsupported("use /v2/models/NAME/generate with beam_width", (False,)),
    "length_penalty": _Unsupported("use /v2/models/NAME/generate with beam_width", (1, 1.0)),
    "guided_whitespace_pattern": _Unsupported("the whitespace allowed in JSON is fixed"),
}
_PATHS: Mapping[type[Fields], str] = {
    ChatFields: "/v1/chat/completions",
    CompletionFields: "/v1/completions",
}
_KNOWN = frozenset(
    (*_UNSUPPORTED, *ChatFields.__struct_fields__, *CompletionFields.__struct_fields__)
)
# No-op values of fields that only one endpoint has. The other endpoint accepts them.
_NO_OP: Mapping[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "echo": False,
    "chat_template_kwargs": {},
    "reasoning_effort": "none",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": [],
}

Kind = TypeVar("Kind", bound=Fields)
Body = TypeVar("Body", bound=msgspec.Struct)


def read_fields(body: bytes, kind: type[Kind]) -> tuple[Kind, list[str]]:
    """Return the fields of a request body, and the names of the unknown ones."""
    given = decode_object(body)
    reject_unsupported(given, _UNSUPPORTED)
    _check_endpoint(given, kind)
    fields = convert_fields(given, kind)
    _check_stream_options(fields)
    check_metadata(fields.metadata or {})
    return fields, _unknown_names(given)


def reject_unsupported(
    given: Mapping[str, Any], unsupported: Mapping[str, tuple[str, Sequence[Any]]]
) -> None:
    """Raise the error of a field that is not supported.

    `unsupported`: the reason of each field, and the values that are accepted: they have no effect.
    """
    for name, (reason, no_op) in unsupported.items():
        if name in given and not any(_equal(given[name], value) for value in no_op):
            raise ApiError(f"{name} is not supported by this server: {reason}", name)


def _unknown_names(given: Mapping[str, Any]) -> list[str]:
    options = [
        f"stream_options.{name}"
        for name in given.get("stream_options", {})
        if name not in StreamOptions.__struct_fields__
    ]
    return [name for name in given if name not in _KNOWN] + options


def _check_endpoint(given: Mapping[str, Any], kind: type[Fields]) -> None:
    """Reject fields of the other endpoint."""
    for other, path in _PATHS.items():
        for name in other.__struct_fields__:
            if (
                name in given
                and name not in kind.__struct_fields__
                and not _equal(given[name], _NO_OP.get(name))
            ):
                raise ApiError(
                    f"{name} is not supported by {_PATHS[kind]}: it belongs to {path}", name
                )


def _check_stream_options(fields: Fields) -> None:
    if fields.stream_options is None:
        return
    if not fields.stream:
        raise ApiError("stream_options needs stream to be true", "stream_options")
    if fields.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise ApiError(f"{name} is not supported by this server: it pads no events", name)


def check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise field_error(
            "metadata", f"must hold at most {_MAX_METADATA} pairs, got {len(metadata)}"
        )
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            lengths = f"{_MAX_METADATA_KEY} characters, values at most {_MAX_METADATA_VALUE}"
            raise field_error("metadata", f"must have keys of at most {lengths}")


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the members of a JSON object. `null` means not given."""
    try:
        document = decode_json(body)
    except TooManyElements as error:
        raise ApiError(f"The body has {error}") from error
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise ApiError(f"The body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError("The body must be a JSON object")
    return {name: value for name, value in document.items() if value is not None}


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def convert_fields(given: dict[str, Any], kind: type[Body]) -> Body:
    """Return the members of a body as `kind`. The error names the field that is wrong."""
    messages = given.get("messages") if "messages" in kind.__struct_fields__ else None
    if isinstance(messages, list) and len(messages) > _MAX_CONVERTED and _are_objects(messages):
        return _convert_long(given, messages, kind)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        if found := _MISSING.fullmatch(str(error)):
            raise ApiError(f"{found[1]} is required", found[1]) from error
        found = _PLACE.fullmatch(str(error))
        if found is None:
            raise ApiError(str(error)) from error
        problem = found["problem"].replace(" | null", "")
        if len(problem) > _MAX_PROBLEM:
            problem = f"{problem[:_MAX_PROBLEM]}…"
        raise ApiError(
            f"{found['place']}: {problem[0].lower()}{problem[1:]}", found["place"]
        ) from error


def read_text(name: str, value: Any) -> str:
    """Return the value of a field that must be a string."""
    if not isinstance(value, str):
        raise field_error(name, "must be a string")
    return value


def _are_objects(values: list[Any]) -> bool:
    return all(type(value) is dict for value in values)


def _convert_long(given: dict[str, Any], messages: list[Any], kind: type[Body]) -> Body:
    """Return the members of a body with a long list of objects, which is not copied.

    The library would hold the interpreter's lock, and so the event loop, while it copies them.
    """
    fields = convert_fields({**given, "messages": messages[:_MAX_CONVERTED]}, kind)
    return msgspec.structs.replace(fields, messages=messages)


def ignored_header(names: Sequence[str]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header that lists the ignored fields, with only characters that it may hold."""
    if not names:
        return ()
    listed = [_NOT_IN_A_HEADER.sub("?", name[:64]) for name in names[:_MAX_LISTED]]
    return ((b"x-slipstream-ignored-fields", ", ".join(listed).encode()),)
