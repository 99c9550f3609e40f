"""Tools: the functions that a model may call, in the format of its chat template."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.sampling_params import Guide
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.openai.tools.call_formats import MARKED, CallFormat, find_format, force_call

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class CallableTools:
    shown: Sequence[dict[str, Any]]  # tools for the chat template
    format: CallFormat
    guide: Guide
    stop_words: Sequence[str] = ()  # end of the first call, if parallel calls are off


async def read_tools(fields: ChatFields, model: OpenAIModel) -> CallableTools | None:
    """Return the tools that the model may call, or None if it may call none."""
    given = fields.tools or []
    if len(given) > _MAX_TOOLS:
        raise field_error("tools", f"must hold at most {_MAX_TOOLS} functions, got {len(given)}")
    functions = [_function(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    choice = "auto" if fields.tool_choice is None else fields.tool_choice
    if choice == "none" or (choice == "auto" and not functions):
        return None
    chosen = _select_functions(functions, choice)
    call_format = _find_format(model)
    tags = [call_format.tag(function) for function in chosen]
    guide = call_format.auto(call_format, tags) if choice == "auto" else force_call(tags)
    try:
        await asyncio.to_thread(check_guide, guide)
    except GuideError as error:
        raise ApiError(f"tools: {error}", "tools") from error
    once = fields.parallel_tool_calls is False and call_format.close
    return CallableTools(given, call_format, guide, (call_format.close,) if once else ())


def _function(name: str, tool: Any) -> dict[str, Any]:
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    if not isinstance(function, dict):
        raise field_error(name, "must be an object with type function and the function")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise field_error(f"{name}.function.name", "must be 1 to 64 letters, digits, _ and -")
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise field_error(
            f"{name}.function.parameters",
            "must be the JSON schema of an object, which holds the arguments",
        )
    return function


def _select_functions(functions: Sequence[dict[str, Any]], choice: Any) -> Sequence[dict[str, Any]]:
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
        raise field_error(
            "tool_choice", "must be none, auto, required or one of the functions in tools"
        )
    return chosen


def _find_format(model: OpenAIModel) -> CallFormat:
    templates = model.tokenizer.chat_templates
    found = find_format(templates.get("tool_use", templates.get("default", "")))
    if found is None:
        formats = (
            f'{MARKED.open}{{"name", "arguments"}}{MARKED.close} nor as {{"name", "parameters"}}'
        )
        raise ApiError(
            "tools is not supported for this model: "
            f"its chat template shows calls neither as {formats}",
            "tools",
        )
    if set(model.tokenizer.encode(found.open, False)) & set(model.tokenizer.special_ids):
        raise ApiError(
            "tools is not supported for this model: "
            f"{found.open} is a special token of its tokenizer",
            "tools",
        )
    return found
