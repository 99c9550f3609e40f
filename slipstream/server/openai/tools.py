"""Functions that a model may call, in the format that its chat template shows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.request import Guide
from slipstream.server.openai.call_formats import MARKED, CallFormat, forced, format_of
from slipstream.server.openai.errors import ApiError, refused
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.models import NamedModel

_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class CallableTools:
    shown: Sequence[dict[str, Any]]  # to the template
    format: CallFormat
    guide: Guide
    stop_words: Sequence[str] = ()  # the end of the first call, where there is to be one only


async def tools_of(fields: ChatFields, model: NamedModel) -> CallableTools | None:
    """None where nothing may be called."""
    given = fields.tools or []
    if len(given) > _MOST_TOOLS:
        raise refused("tools", f"must hold at most {_MOST_TOOLS} functions, got {len(given)}")
    functions = [_function(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    choice = "auto" if fields.tool_choice is None else fields.tool_choice
    if choice == "none" or (choice == "auto" and not functions):
        return None
    chosen, written = _callable(functions, choice), _format_of(model)
    tags = [written.tag(function) for function in chosen]
    guide = written.auto(written, tags) if choice == "auto" else forced(tags)
    try:
        await asyncio.to_thread(check_guide, guide)
    except GuideError as error:
        raise ApiError(f"tools: {error}", "tools") from error
    once = fields.parallel_tool_calls is False and written.close
    return CallableTools(given, written, guide, (written.close,) if once else ())


def _function(name: str, tool: Any) -> dict[str, Any]:
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    if not isinstance(function, dict):
        raise refused(name, "must be an object with type function and the function")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise refused(f"{name}.function.name", "must be 1 to 64 letters, digits, _ and -")
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise refused(
            f"{name}.function.parameters",
            "must be the JSON schema of an object, which holds the arguments",
        )
    return function


def _callable(functions: Sequence[dict[str, Any]], choice: Any) -> Sequence[dict[str, Any]]:
    if choice in ("auto", "required") and functions:
        return functions
    function = (
        choice.get("function")
        if isinstance(choice, dict) and choice.get("type") == "function"
        else None
    )
    chosen = [
        given
        for given in functions
        if isinstance(function, dict) and given["name"] == function.get("name")
    ]
    if not chosen:
        raise refused(
            "tool_choice", "must be none, auto, required or one of the functions in tools"
        )
    return chosen


def _format_of(model: NamedModel) -> CallFormat:
    templates = model.tokenizer.chat_templates
    found = format_of(templates.get("tool_use", templates.get("default", "")))
    if found is None:
        formats = (
            f'{MARKED.open}{{"name", "arguments"}}{MARKED.close} nor as {{"name", "parameters"}}'
        )
        raise ApiError(
            f"tools is not supported for this model: its chat template shows calls neither as {formats}, "
            "the formats that are read",
            "tools",
        )
    if set(model.tokenizer.encode(found.open, False)) & set(model.tokenizer.special_ids):
        raise ApiError(
            f"tools is not supported for this model: {found.open} is no text to its tokenizer",
            "tools",
        )
    return found
