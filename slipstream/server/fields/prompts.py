"""The prompt of a request: a text, a conversation, or token ids with a table of embeddings.

A conversation is the field `messages`: a text that holds a JSON list, which the model's chat
template renders. A model takes it if its config.pbtxt declares the input.

A table of embeddings (prompt tuning) has the rows of token ids beyond the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream.engine.request import PromptTable
from slipstream.model.spec import ModelSpec
from slipstream.server.fields.values import (
    FieldValue,
    RequestFields,
    check_prompt_length,
    too_long,
)
from slipstream.server.kserve.errors import InferenceError, ServerFault
from slipstream.server.kserve.long_json import decode_json
from slipstream.server.kserve.tensors import Array, Tensor
from slipstream.server.text.chat import BrokenTemplate, ChatError, Message
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.longest_token import LONGEST_TOKEN, TooManyTokens
from slipstream.server.text.messages import MessageError, template_messages, unknown_fields
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer

_EXPECTED = 'must be a JSON list of messages, such as [{"role": "user", "content": "Hello"}]'

MAX_TABLE_BYTES = 64 << 20  # bytes of the tables of all sequences of a request
LARGEST_VALUE = 65504.0  # largest FP16 number; a model's own embeddings are near 1


class ChatGenerator(Protocol):
    """Renders conversations. `TextGenerator` is the real one."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def chat_prompt(
        self, messages: Sequence[Message], *, most: int | None = None
    ) -> list[int]: ...


async def conversation_tokens(
    given: FieldValue, generator: ChatGenerator, max_tokens: int
) -> list[int]:
    """Return the tokens of a rendered conversation. Long ones are parsed in a thread."""
    tensor = given.tensor
    if tensor.datatype != "BYTES" or len(tensor.data) != 1:
        raise InferenceError(
            f"{given.name} must be one text of type BYTES, which holds a JSON list of messages"
        )
    check_prompt_length(given, max_tokens, lambda size, most: size > most * LONGEST_TOKEN)
    template = generator.tokenizer.chat_template or ""
    try:
        messages = await in_thread_if_long(
            len(given.value), _parse_messages, given.name, tensor.text(), template, max_tokens
        )
        tokens = await generator.chat_prompt(messages, most=max_tokens)
    except TooManyTokens as error:
        raise too_long(error.count, max_tokens) from error
    except MessageError as error:
        raise InferenceError(str(error)) from error
    except (ChatError, TokenizerError) as error:
        raise InferenceError(f"{given.name}: {error}") from error
    except BrokenTemplate as error:
        raise ServerFault(str(error)) from error
    if not tokens:
        raise InferenceError(f"{given.name} has no tokens: the chat template renders nothing")
    return tokens


def _parse_messages(name: str, text: str, template: str, max_tokens: int) -> list[dict[str, Any]]:
    try:
        messages = decode_json(text.encode())
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise MessageError(name, f"{_EXPECTED}; it is not valid JSON: {error}") from error
    if not isinstance(messages, list):
        raise MessageError(name, _EXPECTED)
    if len(messages) > max_tokens:
        raise MessageError(
            name, f"holds {len(messages)} messages, more than the {max_tokens} tokens of a prompt"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MessageError(f"{name}[{number}]", "must be an object with role and content")
    if unknown := unknown_fields(messages, name):
        raise MessageError(
            unknown[0],
            "is not known: a message has role, content, name, tool_call_id and tool_calls",
        )
    return template_messages(messages, template, name)


def read_prompt_table(
    fields: RequestFields, spec: ModelSpec, sequences: int = 1
) -> PromptTable | None:
    """Return the table of embeddings of a request, if it has one."""
    rows = fields.integer("prompt_vocab_size")
    given = fields.given("prompt_embedding_table")
    if given is None:
        if rows:
            name = fields["prompt_vocab_size"].name
            raise InferenceError(f"{name} is {rows}, but there is no prompt_embedding_table")
        return None
    *_, table_rows, width = given.tensor.shape
    if width != spec.hidden_size:
        raise InferenceError(
            f"{given.name} has rows of {width} numbers, "
            f"the model's hidden size is {spec.hidden_size}"
        )
    if rows > table_rows:
        raise InferenceError(
            f"{given.name} has {table_rows} rows, fewer than the prompt_vocab_size of {rows}"
        )
    size = table_rows * width * 4 * sequences
    if size > MAX_TABLE_BYTES:
        limit = f"over the bound of {MAX_TABLE_BYTES >> 20} MiB"
        raise InferenceError(f"{given.name} takes {size >> 20} MiB, {limit}")
    rows = rows or table_rows
    values = _float32(given.tensor)[: rows * width]
    # NaN fails the comparison. Larger values would give keys and values that are not finite.
    if not (np.abs(values) <= LARGEST_VALUE).all():
        raise InferenceError(
            f"{given.name} must hold finite numbers between "
            f"{-LARGEST_VALUE:g} and {LARGEST_VALUE:g}"
        )
    return PromptTable(spec.vocab_size, rows, values.tobytes())


def prompt_table_salt(fields: RequestFields) -> str:
    """Return the part of the cache salt that separates prompts with the same prompt table.

    It begins with a zero byte, which separates it from the request's own salt before it.
    """
    ids = fields.numbers("prompt_table_extra_ids")
    return "\0" + ",".join(map(str, ids)) if ids else ""


def _float32(tensor: Tensor) -> Array:
    if tensor.datatype == "BF16":  # the upper half of a float32
        return (tensor.array().astype("<u4") << 16).view("<f4")
    return tensor.array().astype("<f4")
