"""Renders conversations to prompts with the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from slipstream.server.text.sandbox import BudgetExceeded, render
from slipstream.server.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None  # functions that the model may call

_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
)


class ChatError(ValueError):
    """The conversation cannot be rendered. The text is one line that the client may see."""


class VariableError(ChatError):
    """A template variable that clients may not set."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Tools = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of the prompt. `variables`: those of the template, e.g. `enable_thinking`."""
    _check_messages(messages)
    for name in variables or {}:
        if name in _OWN_VARIABLES or name in tokenizer.named_tokens:
            raise VariableError(f"'{name}' cannot be given as a variable of the chat template")
    template = _choose_template(tokenizer, tools)
    return _render(
        template,
        tokenizer.named_tokens
        | dict(variables or {})
        | {
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        },
    )


def encode_chat(tokenizer: Tokenizer, rendered: str) -> list[int]:
    """Return the tokens of a rendered conversation, which has its special tokens already."""
    return tokenizer.encode(rendered, add_special_tokens=False)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise ChatError("messages must be a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"messages[{number}] must be an object with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{number}] has no 'role'")


def _choose_template(tokenizer: Tokenizer, tools: Tools) -> str:
    if tools and "tool_use" in tokenizer.chat_templates:
        return tokenizer.chat_templates["tool_use"]
    if tokenizer.chat_template is None:
        raise ChatError(
            "this model has no chat template; put one into its tokenizer's folder as "
            "chat_template.jinja, or as 'chat_template' in its tokenizer_config.json"
        )
    return tokenizer.chat_template


def _render(template: str, variables: dict[str, Any]) -> str:
    try:
        return render(template, variables)
    except BudgetExceeded as problem:
        raise ChatError(f"the chat template wants too much: {problem.message}") from problem
    except TemplateSyntaxError as problem:
        raise ChatError(
            f"the chat template is not valid at line {problem.lineno}: {problem.message}"
        ) from problem
    except RecursionError as problem:
        raise ChatError("the chat template wants too much: endless recursion") from problem
    except Exception as problem:  # a template may fail like any program
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ChatError(f"the chat template failed: {reason}") from problem
