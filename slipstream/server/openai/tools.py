"""Functions that a model may call. One format of calls is read, that of models trained on

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

which their chat templates show (Hermes, Qwen2.5, Qwen3 and others). A guide lets nothing but a whole call of a given
function, with arguments by its schema, follow the mark, so that what is read as a call is one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.guided import GuideError, check_guide
from slipstream.engine.request import Guide
from slipstream.server.openai.errors import ApiError, refused
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.models import NamedModel

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MOST_TOOLS = 128
# Some room to lay the arguments out, but not for ever.
_LAYOUT = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,16}", "lenient": False,
           "coerce_one_of": False}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class CallableTools:
    shown: Sequence[dict[str, Any]]  # to the template
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
    tags = [_tag(function) for function in _callable(functions, choice)]
    _check_format(model)
    if fields.response_format is not None and fields.response_format.get("type") != "text":
        raise refused("response_format", "cannot be combined with tools")
    guide = _auto(tags) if choice == "auto" else _forced(tags)
    try:
        await asyncio.to_thread(check_guide, guide)
    except GuideError as error:
        raise ApiError(f"tools: {error}", "tools") from error
    return CallableTools(given, guide, (CLOSE,) if fields.parallel_tool_calls is False else ())


def _function(name: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refused(name, "must be an object with type function and the function")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise refused(f"{name}.function.name", "must be 1 to 64 letters, digits, _ and -")
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise refused(f"{name}.function.parameters", "must be the JSON schema of an object, which holds the arguments")
    return function


def _callable(functions: Sequence[dict[str, Any]], choice: Any) -> Sequence[dict[str, Any]]:
    if choice in ("auto", "required") and functions:
        return functions
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    chosen = [given for given in functions if isinstance(function, dict) and given["name"] == function.get("name")]
    if not chosen:
        raise refused("tool_choice", "must be none, auto, required or one of the functions in tools")
    return chosen


def _check_format(model: NamedModel) -> None:
    templates = model.tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default", "")).replace('\\"', '"')
    if not all(part in template for part in ("tools", OPEN, '"name"', '"arguments"')):
        raise ApiError("tools is not supported for this model: its chat template does not show calls as "
                       f'{OPEN}{{"name", "arguments"}}{CLOSE}, the one format that is read', "tools")
    if set(model.tokenizer.encode(OPEN, False)) & set(model.tokenizer.special_ids):
        raise ApiError(f"tools is not supported for this model: {OPEN} is no text to its tokenizer", "tools")


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    begin = f'{OPEN}\n{{"name": "{function["name"]}", "arguments": '
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {"begin": begin, "schema": {**schema, "type": "object", "x-guidance": _LAYOUT}, "end": "}\n" + CLOSE}


def _auto(tags: Sequence[dict[str, Any]]) -> Guide:
    """Text, and calls in it."""
    return Guide("structural_tag", json.dumps({"structures": tags, "triggers": [OPEN]}))


def _forced(tags: Sequence[dict[str, Any]]) -> Guide:
    """One call and nothing else, in the library's own language of grammars."""
    rules = [f"call_{number}: {json.dumps(tag['begin'])} arguments_{number} {json.dumps(tag['end'])}\n"
             f"arguments_{number}: %json {json.dumps(tag['schema'])}" for number, tag in enumerate(tags)]
    start = " | ".join(f"call_{number}" for number in range(len(tags)))
    return Guide("ebnf_grammar", "\n".join([f"start: {start}", *rules]))
