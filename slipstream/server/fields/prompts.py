"""What a text model goes on from: a text, or a conversation that the model's own chat template
writes.

A conversation is the field `messages`: a text that holds a JSON list. A model takes it where its
config.pbtxt declares such an input, so that a repository that does not is the one it always was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.server.fields.limits import FieldValue, check_prompt_length
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.text.chat import ChatError
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.messages import MessageError, template_messages, unknown_fields
from slipstream.server.text.pipeline import in_thread_if_long

if TYPE_CHECKING:
    from slipstream.server.models.llm_models import Generator

MESSAGES = "messages"
UNDECLARED = (
    "A conversation is taken by models whose config.pbtxt declares the input "
    '{ name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true }.'
)
_WANTED = 'must be a JSON list of messages, such as [{"role": "user", "content": "Hello"}]'


def check_prompt(
    fields: Mapping[str, FieldValue], names: Mapping[str, str], parameters: Mapping[str, Any]
) -> None:
    """Exactly one field must have the prompt. `names`: those of the model's inputs, by their
    fields.
    """
    text, messages = fields.get("text_input"), fields.get(MESSAGES)
    if messages is None and MESSAGES in parameters:
        raise InferenceError(f"{MESSAGES} is no input of this model. {UNDECLARED}")
    if text is not None and messages is not None:
        raise InferenceError(
            f"{text.name} and {messages.name} cannot be given together: send one of them"
        )
    given = text or messages
    if given is None or given.value is None:
        either = [names[field] for field in ("text_input", MESSAGES) if field in names]
        raise InferenceError(f"{' or '.join(either)} is required")


async def conversation_tokens(given: FieldValue, generator: Generator, longest: int) -> list[int]:
    """The prompt of a conversation; `longest` is in tokens. What is long is read in a thread."""
    tensor = given.tensor
    if tensor.datatype != "BYTES" or len(tensor.data) != 1:
        raise InferenceError(
            f"{given.name} must be one text of type BYTES, which holds a JSON list of messages"
        )
    check_prompt_length(given, longest)
    template = generator.tokenizer.chat_template or ""
    try:
        messages = await in_thread_if_long(
            len(given.value), _read, given.name, tensor.text(), template
        )
        tokens = await generator.chat_prompt(messages)
    except MessageError as error:
        raise InferenceError(str(error)) from error
    except (ChatError, TokenizerError) as error:
        raise InferenceError(f"{given.name}: {error}") from error
    if not tokens:
        raise InferenceError(f"{given.name} has no tokens: the chat template makes nothing of it")
    return tokens


def _read(name: str, text: str, template: str) -> list[dict[str, Any]]:
    try:
        messages = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(name, f"{_WANTED}; it is not valid JSON: {error}") from error
    if not isinstance(messages, list):
        raise MessageError(name, _WANTED)
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MessageError(f"{name}[{number}]", "must be an object with role and content")
    if unknown := unknown_fields(messages, name):
        raise MessageError(
            unknown[0],
            "is not known: a message has role, content, name, tool_call_id and tool_calls",
        )
    return template_messages(messages, template, name)
