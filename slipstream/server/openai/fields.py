"""The bodies of requests: which fields there are, which are refused by name, and what is wrong with
the others.

A field that OpenAI has and this server has not is refused, and so is one of the other API, unless
its value asks for nothing. What other servers take besides, and their clients send, is taken where
the engine has the same, else refused. A field that nobody has is left alone, and the answer names
it in a header. `null` is the same as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slipstream.request_fields.field import PYTHON_TYPES
from slipstream.request_fields.table import COPIED
from slipstream.server.openai.errors import ApiError

_PLACE = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<place>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNFIT_FOR_A_HEADER = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_MOST_NAMED = 32


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


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

    `user`, `safety_identifier` and `prompt_cache_key` are accepted and have no effect.
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
    # The following are not OpenAI's, but fields of other servers.
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
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
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionFields(Fields, kw_only=True):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


_TOOLS = "tools and tool_choice have taken its place"
_TEXT_ONLY = "it answers with text alone"
_NOT_KEPT = "it keeps no conversations"
# By either API: why, and the values that ask for nothing.
_REFUSED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("none",)),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "prediction": ("it takes no draft from a request here", ()),
    "reasoning_effort": ("how long a model thinks is its chat template's to say", ("none",)),
    "verbosity": ("models have no such setting", ("medium",)),
    "web_search_options": ("it fetches nothing", ()),
    "store": (_NOT_KEPT, (False,)),
    "metadata": (_NOT_KEPT, ({},)),
    "prompt_cache_retention": (
        "what stays in the cache is the engine's to say",
        ("in_memory", "in-memory"),
    ),
    "service_tier": ("there is one", ("auto", "default")),
    "suffix": ("it writes on from the prompt, and fills no gaps", ("",)),
    "chat_template": ("a template comes with its model, never with a request", ()),
    "allowed_token_ids": ("the guided_ fields say what may come", ()),
    "prompt_logprobs": ("/v2/models/NAME/generate tells them, with return_prompt_log_probs", ()),
    "use_beam_search": ("/v2/models/NAME/generate searches, with beam_width", (False,)),
    "skip_special_tokens": ("the model's repository says whether they are shown", (True,)),
    "spaces_between_special_tokens": ("a text is its tokens' bytes", (True,)),
    "length_penalty": ("/v2/models/NAME/generate takes it, with beam_width", (1, 1.0)),
    "add_generation_prompt": ("an answer is the assistant's", (True,)),
    "continue_final_message": ("/v1/completions goes on from a text", (False,)),
    "guided_whitespace_pattern": ("how much space JSON may have is fixed", ()),
    "priority": ("/v2/models/NAME/generate takes it", (0,)),
    "structured_outputs": (
        "response_format and the guided_ fields say what an answer must look like",
        ({},),
    ),
}
_PATHS: Mapping[type[Fields], str] = {
    ChatFields: "/v1/chat/completions",
    CompletionFields: "/v1/completions",
}
# Of fields that one API alone has, the values that ask for nothing in the other.
_NOTHING: Mapping[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "echo": False,
    "chat_template_kwargs": {},
    "add_special_tokens": False,
}

Kind = TypeVar("Kind", bound=Fields)


def read_fields(body: bytes, kind: type[Kind]) -> tuple[Kind, list[str]]:
    """The fields, and the names of those that nobody knows."""
    document = _document(body)
    given = {name: value for name, value in document.items() if value is not None}
    for name, (why, nothing) in _REFUSED.items():
        if name in given and not any(_same(given[name], value) for value in nothing):
            raise ApiError(f"{name} is not supported by this server: {why}", name)
    _check_place(given, kind)
    known = {*_REFUSED, *(name for each in _PATHS for name in each.__struct_fields__)}
    fields = _converted(given, kind)
    _check_stream_options(fields)
    options = given.get("stream_options", {})
    return fields, [
        *(name for name in given if name not in known),
        *(
            f"stream_options.{name}"
            for name in options
            if name not in StreamOptions.__struct_fields__
        ),
    ]


def _check_place(given: Mapping[str, Any], kind: type[Fields]) -> None:
    for other, path in _PATHS.items():
        for name in other.__struct_fields__:
            if (
                name in given
                and name not in kind.__struct_fields__
                and not _same(given[name], _NOTHING.get(name))
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


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError("The body must be a JSON object")
    return document


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _converted(given: dict[str, Any], kind: type[Kind]) -> Kind:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        if found := _MISSING.fullmatch(str(error)):
            raise ApiError(f"{found[1]} is required", found[1]) from error
        found = _PLACE.fullmatch(str(error))
        if found is None:
            raise ApiError(str(error)) from error
        problem = found["problem"].replace(" | null", "")
        raise ApiError(
            f"{found['place']}: {problem[0].lower()}{problem[1:]}", found["place"]
        ) from error


def ignored_header(names: Sequence[str]) -> tuple[tuple[bytes, bytes], ...]:
    """The header that names what was ignored; only letters that a header may hold."""
    if not names:
        return ()
    fit = [_UNFIT_FOR_A_HEADER.sub("?", name[:64]) for name in names[:_MOST_NAMED]]
    return ((b"x-slipstream-ignored-fields", ", ".join(fit).encode()),)
