"""Tools: the functions that a model may call, in the format of its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.tools.call_formats import HERMES, CallFormat, find_format
from slipstream.server.openai.tools.call_grammar import CallRules
from slipstream.server.openai.tools.tool_prompt import (
    Message,
    adapt_history,
    add_instructions,
    describe_tools,
)
from slipstream.server.text.tokenizer import Tokenizer

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHOWS_TOOLS = re.compile(r"\btools\b")
_WRONG_CHOICE = "must be none, auto, required or one of the functions in tools"

Function = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The use of tools in a conversation: the calls of the answer, and those in the messages."""

    template: str  # the chat template that the conversation is rendered with
    format: CallFormat
    rules: CallRules | None  # calls that the answer may have; None: none
    shown: Sequence[dict[str, Any]] | None  # tools for the chat template
    instructions: str  # description of the tools for the messages; empty: the template shows them

    def adapt(self, messages: list[Message]) -> list[Message]:
        """Return the messages in the form that the template takes."""
        adapted = adapt_history(messages, self.template, self.format)
        if self.instructions:
            return add_instructions(adapted, self.instructions, self.template)
        return adapted


def read_tools(fields: ChatFields, tokenizer: Tokenizer, parser: str = "") -> ToolUse:
    """Return the tools that the model may call, and how its chat template shows them.

    `parser`: the name of the format of calls; empty: the one that the template shows.
    """
    given = fields.tools or []
    if len(given) > _MAX_TOOLS:
        raise field_error("tools", f"must hold at most {_MAX_TOOLS} functions, got {len(given)}")
    functions = [_function(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    choice = _read_choice(fields, functions)
    templates = tokenizer.chat_templates
    template = templates.get("default", "")
    if choice is None:
        return ToolUse(template, find_format(template, parser) or HERMES, None, None, "")
    tool_template = templates.get("tool_use", template)
    found = find_format(tool_template, parser)
    shows_tools = found is not None and _SHOWS_TOOLS.search(tool_template) is not None
    call_format = found or HERMES
    many = choice.many and call_format.many and fields.parallel_tool_calls is not False
    rules = CallRules(call_format, choice.functions, choice.required, many)
    if shows_tools:
        shown = [_described(tool) for tool in given] if call_format.channels else given
        return ToolUse(tool_template, call_format, rules, shown, "")
    try:
        instructions = describe_tools(given, call_format)
    except RecursionError as error:
        raise field_error("tools", "has a schema that nests too deeply") from error
    return ToolUse(template, call_format, rules, None, instructions)


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with a description, which the template of gpt-oss needs."""
    return {**tool, "function": {"description": "", **tool["function"]}}


@dataclass(frozen=True)
class _Choice:
    functions: Sequence[Function]
    required: bool = False
    many: bool = True


def _read_choice(fields: ChatFields, functions: Sequence[Function]) -> _Choice | None:
    """Return the functions that the answer may call, or None if it may call none."""
    choice = "auto" if fields.tool_choice is None else fields.tool_choice
    if choice == "none" or (choice == "auto" and not functions):
        return None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), functions)
    if choice in ("auto", "required") and functions:
        return _Choice(functions, choice == "required")
    chosen = _find_function(choice, functions)
    if chosen is None:
        raise field_error("tool_choice", _WRONG_CHOICE)
    return _Choice([chosen], required=True, many=False)


def _read_allowed(allowed: Any, functions: Sequence[Function]) -> _Choice:
    name = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise field_error(f"{name}.mode", "must be auto or required")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise field_error(f"{name}.tools", "must hold at least one of the functions in tools")
    chosen = []
    for number, tool in enumerate(listed):
        function = _find_function(tool, functions)
        if function is None:
            raise field_error(f"{name}.tools[{number}]", "must be one of the functions in tools")
        if function not in chosen:
            chosen.append(function)
    return _Choice(chosen, allowed["mode"] == "required")


def _find_function(choice: Any, functions: Sequence[Function]) -> Function | None:
    """Return the function that a choice of type function names."""
    named = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(named, dict) or choice.get("type") != "function":
        return None
    return next((given for given in functions if given["name"] == named.get("name")), None)


def _function(name: str, tool: Any) -> dict[str, Any]:
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    if not isinstance(function, dict):
        raise field_error(name, "must be an object with type function and the function")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise field_error(f"{name}.function.name", "must be 1 to 64 letters, digits, _ and -")
    for key, kind, expected in (("description", str, "a string"), ("strict", bool, "a boolean")):
        if not isinstance(function.get(key), kind | None):
            raise field_error(f"{name}.function.{key}", f"must be {expected}")
    schema = function.get("parameters")
    if schema is None:
        return function
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise field_error(
            f"{name}.function.parameters",
            "must be the JSON schema of an object, which holds the arguments",
        )
    return function
