"""What a model is to go on from, as tokens: a conversation by its chat template, or texts and
tokens as they are.
"""

from __future__ import annotations

from typing import Any

from slipstream.request_fields.field import Range
from slipstream.request_fields.table import number_range
from slipstream.server.fields.limits import LONGEST_TOKEN_CHARACTERS
from slipstream.server.openai.errors import ApiError, refused
from slipstream.server.openai.fields import ChatFields, CompletionFields, Fields
from slipstream.server.openai.models import NamedModel
from slipstream.server.openai.sampling import bounded
from slipstream.server.text.chat import ChatError, Tools, VariableError
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.messages import MessageError, template_messages
from slipstream.server.text.pipeline import in_thread_if_long

Prompt = str | list[int]
_MOST_VARIABLES, _LARGEST_VALUE = 32, 1024


async def chat_tokens(fields: ChatFields, size: int, model: NamedModel, tools: Tools) -> list[int]:
    """size: of the body. What is long is looked at in threads: others' streams must not wait for
    it.
    """
    template = model.tokenizer.chat_template or ""
    variables = _variables_of(fields)
    try:
        messages = await in_thread_if_long(size, template_messages, fields.messages, template)
        _check_characters("messages", sum(len(message["content"]) for message in messages), model)
        tokens = await model.text.generator.chat_prompt(messages, tools=tools, variables=variables)
    except MessageError as error:
        raise ApiError(str(error), error.field) from error
    except VariableError as error:
        raise ApiError(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    except (ChatError, TokenizerError) as error:
        raise ApiError(str(error), "messages") from error
    return _fitting("messages", _last(tokens, fields, model), model)


def _variables_of(fields: ChatFields) -> dict[str, Any]:
    """A template's own switches, such as enable_thinking. What a template could loop over is none."""
    given = {
        name: value
        for name, value in (fields.chat_template_kwargs or {}).items()
        if value is not None
    }
    if len(given) > _MOST_VARIABLES:
        raise refused(
            "chat_template_kwargs",
            f"must hold at most {_MOST_VARIABLES} switches, got {len(given)}",
        )
    for name, value in given.items():
        size = (
            len(value)
            if isinstance(value, str)
            else value.bit_length()
            if isinstance(value, int)
            else 0
        )
        if not isinstance(value, int | float | str) or size > _LARGEST_VALUE:
            what = (
                f"must be true, false, a number, or a text of at most {_LARGEST_VALUE} characters"
            )
            raise refused(f"chat_template_kwargs.{name[:40]}", what)
    return given


def prompts_of(fields: CompletionFields) -> list[Prompt]:
    """A text, tokens, or a list of either."""
    given = fields.prompt
    if given is None:
        raise refused("prompt", "is required")
    most = number_range("num_return_sequences").high
    prompts = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise refused("prompt", "must be a string, a list of token ids, or a list of those")
    if most is not None and len(prompts) > most:
        raise refused("prompt", f"must hold at most {most:g} prompts, got {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_tokens(prompt):
            raise refused(f"prompt[{number}]", "must be a string or a list of token ids")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


async def prompt_tokens(prompt: Prompt, fields: CompletionFields, model: NamedModel) -> list[int]:
    """A text with or without special tokens, as the request or the model's repository says; ids as
    they are.
    """
    tokenizer, special = model.tokenizer, fields.add_special_tokens
    try:
        if isinstance(prompt, str):
            _check_characters("prompt", len(prompt), model)
            wanted = model.text.engine.add_special_tokens if special is None else special
            tokens = await in_thread_if_long(len(prompt), tokenizer.encode, prompt, wanted)
            tokens = _last(tokens, fields, model, begun=wanted)
        else:
            tokens = _fitting("prompt", _last(prompt, fields, model), model)
            tokenizer.check_ids(tokens)
    except TokenizerError as error:
        raise ApiError(f"prompt: {error}", "prompt") from error
    if not tokens and tokenizer.bos_id is not None and special is not False:
        tokens = [tokenizer.bos_id]  # the beginning of a text
    return _fitting("prompt", tokens, model)


def _last(tokens: list[int], fields: Fields, model: NamedModel, begun: bool = False) -> list[int]:
    """The end of a prompt, as many tokens of it as truncate_prompt_tokens says. begun: with special
    tokens, of which that of a beginning stays, as models were taught that a text has one.
    """
    most = (
        model.longest_prompt
        if fields.truncate_prompt_tokens == -1
        else fields.truncate_prompt_tokens
    )
    if most is None:
        return tokens
    bounded("truncate_prompt_tokens", most, Range(1))
    left_out = max(0, len(tokens) - most)
    first = 1 if begun and tokens[:1] == [model.tokenizer.bos_id] else 0
    return tokens[:first] + tokens[first + left_out :]


def _check_characters(name: str, size: int, model: NamedModel) -> None:
    """Refuse, without reading it, what no tokenizer could make short enough."""
    if size > model.longest_prompt * LONGEST_TOKEN_CHARACTERS:
        raise _too_long(name, f"over {model.longest_prompt}", model)


def _fitting(name: str, tokens: list[int], model: NamedModel) -> list[int]:
    if not tokens:
        raise refused(name, "has no tokens")
    if len(tokens) > model.longest_prompt:
        raise _too_long(name, str(len(tokens)), model)
    return tokens


def _too_long(name: str, tokens: str, model: NamedModel) -> ApiError:
    text = f"{name} has {tokens} tokens, and this model takes at most {model.longest_prompt}"
    return ApiError(text, name, code="context_length_exceeded")
