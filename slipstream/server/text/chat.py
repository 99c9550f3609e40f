"""Renders conversations to prompts with the model's own chat template."""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from slipstream.server.text.sandbox import BudgetExceeded, NotBrief, RaisedByTemplate, render
from slipstream.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None  # functions that the model may call

_MESSAGE_SIZE = 32  # characters that count for a message, beside its content
_COUNTED_MESSAGES = 8192
_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
)


@dataclass(frozen=True)
class ChatOptions:
    """Settings of the server about conversations, for all models."""

    template_folder: Path | None = None  # tokenizer whose chat templates every model uses
    tool_call_parser: str = ""  # name of the format of calls; empty: as the template shows
    reasoning_parser: str = ""  # name of the format of reasoning; empty: as the template shows


DEFAULT_CHAT = ChatOptions()


class ChatError(ValueError):
    """The conversation cannot be rendered. The text is one line that the client may see."""


class VariableError(ChatError):
    """A template variable that clients may not set."""


class ContinueError(ChatError):
    """The final message cannot be continued."""


class BrokenTemplate(Exception):
    """The model's chat template renders no conversation. It is the server's fault, not a client's.

    The text is one line that the client may see.
    """


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Tools = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    brief: bool = False,
) -> str:
    """Return the text of the prompt. `variables`: those of the template, e.g. `enable_thinking`.

    `brief`: raise NotBrief where the template takes longer than the event loop may be delayed.
    `continue_final_message` ends the prompt with the text of the final message, so that the model
    continues it. It excludes `add_generation_prompt`.
    """
    _check_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise ContinueError("cannot be combined with add_generation_prompt")
    for name in variables or {}:
        if name in _OWN_VARIABLES or name in tokenizer.named_tokens:
            raise VariableError(f"'{name}' cannot be given as a variable of the chat template")
    template = _choose_template(tokenizer, tools)
    mark = f"continue-{secrets.token_hex(8)} " if continue_final_message else ""
    rendered = _render(
        template,
        tokenizer.named_tokens,
        dict(variables or {})
        | {
            "messages": _with_mark(messages, mark),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        },
        brief,
    )
    return _before_mark(rendered, mark) if mark else rendered


def _with_mark(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return the messages, the last one with a mark after its text."""
    if not mark:
        return list(messages)
    final = messages[-1]
    if not isinstance(final.get("content"), str):
        raise ContinueError("needs a final message whose content is text")
    return [*messages[:-1], {**final, "content": final["content"] + mark}]


def _before_mark(rendered: str, mark: str) -> str:
    """Return the conversation up to the end of its final message."""
    end = rendered.rfind(mark.strip())
    if end < 0:
        raise ContinueError("does not fit: the chat template leaves the final message out")
    if rendered[end : end + len(mark)] == mark:
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims the ends of messages


def encode_chat(
    tokenizer: Tokenizer,
    rendered: str,
    add_special_tokens: bool = False,
    most: int | None = None,
) -> list[int]:
    """Return the tokens of a rendered conversation, which usually has special tokens already."""
    return tokenizer.encode(rendered, add_special_tokens, most)


def conversation_size(messages: Sequence[Message]) -> int:
    """Return about how many characters a conversation has; a message costs some by itself.

    No more messages are counted than it takes to see that it is large.
    """
    size = len(messages) * _MESSAGE_SIZE
    for message in itertools.islice(messages, _COUNTED_MESSAGES):
        content = message.get("content") if isinstance(message, Mapping) else None
        size += len(content) if isinstance(content, str) else 0
    return size


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


def _render(
    template: str, named_tokens: Mapping[str, str], variables: Mapping[str, Any], brief: bool
) -> str:
    try:
        return render(template, {**named_tokens, **variables}, brief)
    except NotBrief:
        raise
    except RaisedByTemplate as problem:
        raise ChatError(f"the chat template {_explain(problem)}") from problem
    except Exception as problem:  # a template may fail like any program
        if fault := _template_fault(template, tuple(sorted(named_tokens.items()))):
            raise BrokenTemplate(fault) from problem
        raise ChatError(f"the chat template {_explain(problem)}") from problem


# Conversations that a chat template must be able to render, or refuse in its own words.
_PLAIN_CONVERSATIONS: Sequence[list[Message]] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
)


@functools.lru_cache(maxsize=32)
def _template_fault(template: str, named_tokens: Sequence[tuple[str, str]]) -> str:
    """Return why a template renders no conversation at all, "" if it renders some. Log it once."""
    reason = ""
    for messages in _PLAIN_CONVERSATIONS:
        variables = {"messages": messages, "tools": None, "documents": None}
        try:
            render(template, {**dict(named_tokens), **variables, "add_generation_prompt": True})
        except RaisedByTemplate:
            return ""
        except Exception as problem:  # a template may fail like any program
            reason = f"the chat template of this model {_explain(problem)}"
        else:
            return ""
    logger.error("%s: correct it in the tokenizer's folder, and load the model again", reason)
    return f"{reason.rstrip('.')}: this is an error of the server, not of the request"


def _explain(problem: Exception) -> str:
    match problem:
        case BudgetExceeded():
            return f"exceeds its limits: {problem.message}"
        case TemplateSyntaxError():
            return f"is not valid at line {problem.lineno}: {problem.message}"
        case RecursionError():
            return "exceeds its limits: endless recursion"
    return f"failed: {' '.join(str(problem).split()) or type(problem).__name__}"
