"""The tokens of prompts: of conversations, rendered by the chat template, and of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.request_fields.field import Range
from slipstream.request_fields.table import number_range
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import ChatFields, CompletionFields, Fields
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.openai.sampling import check_bound
from slipstream.server.text.chat import ChatError, ContinueError, Tools, VariableError
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.longest_token import LONGEST_TOKEN, TooManyTokens
from slipstream.server.text.messages import MessageError, template_messages
from slipstream.server.text.threads import in_thread_if_long

Prompt = str | list[int]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_VARIABLES = 32
_MAX_VARIABLE_SIZE = 1024  # characters of a text, bits of a number


async def chat_tokens(
    fields: ChatFields,
    body_bytes: int,
    model: OpenAIModel,
    tools: Tools,
    adapt: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> list[int]:
    """Return the tokens of a conversation. `adapt` changes the messages for the template.

    Large requests are read in a thread, so that other requests' streams do not wait.
    """
    template = model.tokenizer.chat_template or ""
    variables = _effort_variables(fields, read_template_variables(fields.chat_template_kwargs))
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise field_error("continue_final_message", "cannot be combined with add_generation_prompt")
    most = None if fields.truncate_prompt_tokens is not None else model.longest_prompt
    check_message_count(fields.messages, model)

    def read_messages() -> tuple[list[dict[str, Any]], int]:
        messages = adapt(template_messages(fields.messages, template))
        return messages, sum(len(message["content"]) for message in messages)

    try:
        messages, characters = await in_thread_if_long(body_bytes, read_messages)
        check_characters("messages", characters, model, cut=most is None)
        tokens = await model.text.engine.generator.chat_prompt(
            messages,
            add_generation_prompt=not continues and fields.add_generation_prompt is not False,
            continue_final_message=continues,
            add_special_tokens=bool(fields.add_special_tokens),
            tools=tools,
            documents=fields.documents,
            variables=variables,
            most=most,
        )
    except TooManyTokens as error:
        raise _too_long("messages", str(error.count), model) from error
    except MessageError as error:
        raise ApiError(str(error), error.field) from error
    except VariableError as error:
        raise ApiError(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    except ContinueError as error:
        raise field_error("continue_final_message", str(error)) from error
    except (ChatError, TokenizerError) as error:
        raise ApiError(str(error), "messages") from error
    tokens = _truncate(tokens, fields, model)
    check_tokens("messages", tokens, model)
    return tokens


def read_template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template's own switches, such as enable_thinking.

    Lists and objects are rejected, because a template could loop over them.
    """
    variables = {name: value for name, value in (given or {}).items() if value is not None}
    if len(variables) > _MAX_VARIABLES:
        raise field_error(
            "chat_template_kwargs",
            f"must hold at most {_MAX_VARIABLES} switches, got {len(variables)}",
        )
    for name, value in variables.items():
        if not isinstance(value, int | float | str) or _size(value) > _MAX_VARIABLE_SIZE:
            allowed = f"true, false, a number, or a text of at most {_MAX_VARIABLE_SIZE} characters"
            raise field_error(f"chat_template_kwargs.{name[:40]}", f"must be {allowed}")
    return variables


def _effort_variables(fields: ChatFields, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables with reasoning_effort. "none" turns thinking off."""
    effort = fields.reasoning_effort
    if effort is None:
        return variables
    if effort not in _EFFORTS:
        raise field_error(
            "reasoning_effort", f"must be one of {', '.join(_EFFORTS)}, got '{effort[:40]}'"
        )
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return {**thinking, **variables, "reasoning_effort": effort}


def _size(value: float | str) -> int:
    if isinstance(value, str):
        return len(value)
    return value.bit_length() if isinstance(value, int) else 0


def read_prompts(fields: CompletionFields) -> list[Prompt]:
    """Return the prompts of a completion: texts and lists of token ids."""
    given = fields.prompt
    if given is None:
        raise field_error("prompt", "is required")
    limit = number_range("num_return_sequences").high
    prompts = [given] if isinstance(given, str) or is_tokens(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise field_error("prompt", "must be a string, a list of token ids, or a list of those")
    if limit is not None and len(prompts) > limit:
        raise field_error("prompt", f"must hold at most {limit:g} prompts, got {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_tokens(prompt):
            raise field_error(f"prompt[{number}]", "must be a string or a list of token ids")
    return prompts


def is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


async def prompt_tokens(prompt: Prompt, fields: CompletionFields, model: OpenAIModel) -> list[int]:
    """Return the tokens of a prompt.

    The request, or else the model's repository, says whether a text gets special tokens.
    """
    try:
        if isinstance(prompt, str):
            tokens = await _text_tokens(prompt, fields, model)
        else:
            tokens = _truncate(prompt, fields, model)
            check_tokens("prompt", tokens, model)
            model.tokenizer.check_ids(tokens)
    except TokenizerError as error:
        raise ApiError(f"prompt: {error}", "prompt") from error
    bos_id = model.tokenizer.bos_id
    if not tokens and bos_id is not None and fields.add_special_tokens is not False:
        tokens = [bos_id]
    check_tokens("prompt", tokens, model)
    return tokens


async def _text_tokens(prompt: str, fields: CompletionFields, model: OpenAIModel) -> list[int]:
    most = None if fields.truncate_prompt_tokens is not None else model.longest_prompt
    check_characters("prompt", len(prompt), model, cut=most is None)
    special = fields.add_special_tokens
    if special is None:
        special = model.text.engine.model.add_special_tokens
    encode = model.tokenizer.encode
    try:
        tokens = await in_thread_if_long(len(prompt), encode, prompt, special, most)
    except TooManyTokens as error:
        raise _too_long("prompt", str(error.count), model) from error
    return _truncate(tokens, fields, model, keep_bos=special)


def _truncate(
    tokens: list[int], fields: Fields, model: OpenAIModel, keep_bos: bool = False
) -> list[int]:
    """Return the last tokens of a prompt, as many as truncate_prompt_tokens says, or the first.

    `keep_bos` keeps a BOS token at the start, because models are trained with one.
    """
    limit = fields.truncate_prompt_tokens
    if limit == -1:
        limit = model.longest_prompt
    if limit is None:
        return tokens
    check_bound("truncate_prompt_tokens", limit, Range(1))
    left_out = max(0, len(tokens) - limit)
    if fields.truncation_side == "right":
        return tokens[:limit]
    first = 1 if keep_bos and tokens[:1] == [model.tokenizer.bos_id] else 0
    return tokens[:first] + tokens[first + left_out :]


def check_message_count(messages: Sequence[Any], model: OpenAIModel) -> None:
    """Reject, without rendering it, a conversation with more messages than tokens fit."""
    if len(messages) > model.longest_prompt:
        raise _too_long("messages", f"over {model.longest_prompt}", model)


def check_characters(name: str, size: int, model: OpenAIModel, cut: bool = False) -> None:
    """Reject, without tokenizing it, a text that has too many tokens.

    `cut`: the text may have more tokens than the model takes, because only some are used.
    """
    most = model.longest_prompt
    too_long = size > most * LONGEST_TOKEN if cut else model.tokenizer.surely_exceeds(size, most)
    if too_long:
        raise _too_long(name, f"over {model.longest_prompt}", model)


def check_tokens(name: str, tokens: list[int], model: OpenAIModel) -> None:
    if not tokens:
        raise field_error(name, "has no tokens")
    if len(tokens) > model.longest_prompt:
        raise _too_long(name, str(len(tokens)), model)


def _too_long(name: str, tokens: str, model: OpenAIModel) -> ApiError:
    text = f"{name} has {tokens} tokens, and this model takes at most {model.longest_prompt}"
    return ApiError(text, name, code="context_length_exceeded")
