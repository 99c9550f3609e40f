"""Writes an answer as Anthropic's message: whole, or as the events of a stream."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from slipstream.server.anthropic.errors import error_body, new_request_id
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.answers.parts import CallArguments, CallStart, Part, Reasoning
from slipstream.server.openai.calls import Document
from slipstream.server.openai.chat import PreparedChat
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.generation import CallAnswers

# Key of the text of a block, and the type and key of the events with its pieces.
_DELTAS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


@dataclass
class _OpenBlock:
    """The block that the answer is writing at present."""

    index: int
    block: Document
    pieces: list[str] = field(default_factory=list)

    def start(self) -> Iterator[Document]:
        yield {
            "type": "content_block_start",
            "index": self.index,
            "content_block": dict(self.block),
        }

    def add(self, text: str) -> Iterator[Document]:
        self.pieces.append(text)
        _, kind, key = _DELTAS[self.block["type"]]
        yield self._delta({"type": kind, key: text})

    def finish(self) -> Iterator[Document]:
        text = "".join(self.pieces)
        kind = self.block["type"]
        self.block[_DELTAS[kind][0]] = _arguments(text) if kind == "tool_use" else text
        if kind == "thinking":
            self.block["signature"] = _sign(text)
            yield self._delta({"type": "signature_delta", "signature": self.block["signature"]})
        yield {"type": "content_block_stop", "index": self.index}

    def _delta(self, delta: Document) -> Document:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


def _arguments(text: str) -> Document:
    """Return the arguments of a call; none if the answer ended within them."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _sign(thinking: str) -> str:
    """Return a signature, which clients expect. It is not checked when it comes back."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode()


@dataclass
class Content:
    """The blocks of a message. A change between text, thinking and calls begins a new block."""

    omit_thinking: bool  # thinking blocks are empty
    blocks: list[Document] = field(default_factory=list)  # finished blocks
    _open: _OpenBlock | None = None

    def push(self, parts: Iterable[Part]) -> Iterator[Document]:
        """Yield the events of the next parts."""
        for part in parts:
            match part:
                case str():
                    yield from self._switch({"type": "text", "text": "", "citations": None})
                    yield from self._add(part)
                case Reasoning():
                    yield from self._switch({"type": "thinking", "thinking": "", "signature": ""})
                    if not self.omit_thinking:
                        yield from self._add(part.text)
                case CallStart():
                    yield from self.finish()
                    identity = f"toolu_{part.id.removeprefix('call_')}"
                    yield from self._begin(
                        {"type": "tool_use", "id": identity, "name": part.name, "input": {}}
                    )
                case CallArguments():
                    yield from self._add(part.text)

    def finish(self) -> Iterator[Document]:
        if self._open is not None:
            yield from self._open.finish()
            self.blocks.append(self._open.block)
            self._open = None

    def _switch(self, block: Document) -> Iterator[Document]:
        if self._open is None or self._open.block["type"] != block["type"]:
            yield from self.finish()
            yield from self._begin(block)

    def _begin(self, block: Document) -> Iterator[Document]:
        self._open = _OpenBlock(len(self.blocks), block)
        yield from self._open.start()

    def _add(self, text: str) -> Iterator[Document]:
        assert self._open is not None
        yield from self._open.add(text)


class MessageWriter:
    def __init__(
        self, prepared: PreparedChat, stop_sequences: Sequence[str], omit_thinking: bool
    ) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._prepared = prepared
        self._stop_sequences = stop_sequences
        self._stop_sequence: str | None = None  # sequence that ended the text
        self._reader = prepared.new_reader()
        self._content = Content(omit_thinking)
        self._started = False

    def whole(self, answers: CallAnswers) -> bytes:
        choice = answers.choices[0]
        for _ in self._push(choice):
            pass
        for _ in self._content.finish():
            pass
        message = self._message(answers)
        return msgspec.json.encode(message | {"content": self._content.blocks, **self._end(choice)})

    def events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        events: list[Document] = []
        if not self._started:
            self._started = True
            events.append({"type": "message_start", "message": self._message(answers)})
        return _encode([*events, *self._push(output)])

    def end(self, answers: CallAnswers) -> bytes:
        last = {
            "type": "message_delta",
            "delta": self._end(answers.choices[0]),
            "usage": _usage(answers),
        }
        return _encode([*self._content.finish(), last, {"type": "message_stop"}])

    def failure(self, problem: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(problem, new_request_id())

    def _push(self, output: TextOutput | Completion) -> Iterator[Document]:
        text = output.text
        if output.finish_reason == "stop":
            found = [word for word in self._stop_sequences if text.endswith(word)]
            self._stop_sequence = max(found, key=len, default=None)
            text = text.removesuffix(self._stop_sequence or "")
        yield from self._content.push(self._reader.push(text, last=bool(output.finish_reason)))

    def _message(self, answers: CallAnswers) -> Document:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model.id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answers),
        }

    def _end(self, choice: Completion) -> Document:
        return {"stop_reason": self._stop_reason(choice), "stop_sequence": self._stop_sequence}

    def _stop_reason(self, choice: Completion) -> str:
        if choice.finish_reason != "stop":
            limit = self._prepared.text.sampling.max_tokens
            full = choice.finish_reason == "length" and len(choice.tokens) < limit
            return "model_context_window_exceeded" if full else "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.calls else "end_turn"


def _usage(answers: CallAnswers) -> Document:
    """Return the usage. Tokens of the prompt that were cached are counted apart."""
    usage = answers.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": details.get("reasoning_tokens", 0)},
    }


def _encode(events: Iterable[Document]) -> bytes:
    written = [
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    ]
    return b"".join(written)
