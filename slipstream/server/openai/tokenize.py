"""POST /tokenize and /detokenize, in vLLM's format and in llama-server's.

A body with `prompt` or `messages` is vLLM's. A body with `content` is llama-server's. The two
formats of /detokenize share their request, so its response has the text under both names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.chat import prepare_chat
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import ChatFields, convert_fields, decode_object
from slipstream.server.openai.models import OpenAIModel, find_model_or_default
from slipstream.server.openai.prompts import check_characters
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.threads import in_thread_if_long

_WRITTEN_AT_ONCE = 16384  # tokens
_SOURCES = ("prompt", "messages", "content")


class TokenizeFields(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool = False
    # of messages
    add_generation_prompt: bool | None = None  # default: true
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # of llama-server
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(body: bytes, registry: ModelRegistry) -> bytes:
    fields = await in_thread_if_long(len(body), _read, body)
    model = await find_model_or_default(registry, fields.model)
    tokens = await _tokens(fields, len(body), model)
    return await in_thread_if_long(len(tokens), _write, fields, tokens, model)


async def detokenize(body: bytes, registry: ModelRegistry) -> bytes:
    fields = await in_thread_if_long(
        len(body), lambda: convert_fields(decode_object(body), DetokenizeFields)
    )
    model = await find_model_or_default(registry, fields.model)
    tokens = fields.tokens
    try:
        text = await in_thread_if_long(len(tokens), model.tokenizer.decode, tokens, False)
    except TokenizerError as error:
        raise ApiError(f"tokens: {error}", "tokens") from error
    return msgspec.json.encode({"prompt": text, "content": text})


def _read(body: bytes) -> TokenizeFields:
    given = decode_object(body)
    sources = [name for name in _SOURCES if name in given]
    if not sources:
        raise ApiError("prompt, messages or content is required", "prompt")
    if len(sources) > 1:
        raise field_error(sources[1], f"cannot be combined with {sources[0]}")
    fields = convert_fields(given, TokenizeFields)
    if not fields.parse_special:
        raise field_error("parse_special", "must be true: special tokens in a text are recognised")
    return fields


async def _tokens(fields: TokenizeFields, body_bytes: int, model: OpenAIModel) -> list[int]:
    if fields.messages is not None:
        return await _conversation_tokens(fields, fields.messages, body_bytes, model)
    if fields.prompt is not None:
        return await _text_tokens(
            "prompt", fields.prompt, fields.add_special_tokens is not False, model
        )
    return await _text_tokens("content", fields.content or "", fields.add_special, model)


async def _text_tokens(name: str, text: str, special: bool, model: OpenAIModel) -> list[int]:
    check_characters(name, len(text), model, cut=True)
    try:
        return await in_thread_if_long(len(text), model.tokenizer.encode, text, special)
    except TokenizerError as error:
        raise ApiError(f"{name}: {error}", name) from error


async def _conversation_tokens(
    fields: TokenizeFields, messages: list[dict[str, Any]], body_bytes: int, model: OpenAIModel
) -> list[int]:
    """Return the prompt of a chat completion with these fields."""
    chat = ChatFields(
        model=model.id,
        messages=messages,
        tools=fields.tools,
        chat_template_kwargs=fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
    )
    prompt = (await prepare_chat(chat, body_bytes, model)).text.prompt
    assert not isinstance(prompt, str)
    return prompt


def _write(fields: TokenizeFields, tokens: list[int], model: OpenAIModel) -> bytes:
    if fields.content is not None:
        pieces = partial(_pieces, model=model) if fields.with_pieces else None
        return b'{"tokens":%b}' % _write_list(tokens, pieces)
    head = {"count": len(tokens), "max_model_len": model.context_tokens}
    texts = b"null"
    if fields.return_token_strs:
        texts = _write_list(tokens, lambda some: [model.tokenizer.token(token) for token in some])
    members = [msgspec.json.encode(head)[:-1], _write_list(tokens), texts]
    return b'%b,"tokens":%b,"token_strs":%b}' % tuple(members)


def _write_list(tokens: list[int], convert: Callable[[list[int]], Any] | None = None) -> bytes:
    """Return a JSON array with one element for each token.

    The encoder holds the interpreter's lock, and so the event loop, for a part of them only.
    """
    parts = []
    for start in range(0, len(tokens), _WRITTEN_AT_ONCE):
        some = tokens[start : start + _WRITTEN_AT_ONCE]
        parts.append(msgspec.json.encode(convert(some) if convert else some)[1:-1])
    return b"[%b]" % b",".join(parts)


def _pieces(tokens: list[int], model: OpenAIModel) -> list[dict[str, Any]]:
    """Return the text of each token, or its bytes where they are no valid text."""
    pieces = []
    spelled = model.tokenizer.token_bytes
    for token in tokens:
        raw = spelled(token) if spelled is not None else b""
        try:
            piece: str | list[int] = raw.decode() if raw else model.tokenizer.decode([token], False)
        except UnicodeDecodeError:
            piece = list(raw)
        pieces.append({"id": token, "piece": piece})
    return pieces
