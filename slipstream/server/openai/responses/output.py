"""The output items of a response, built from the parts of an answer, with their stream events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.server.openai.answers.parts import CallArguments, CallStart, Part, Reasoning
from slipstream.server.openai.calls import Document
from slipstream.server.openai.responses.items import Item, new_id

# The type of an event and its fields, without the sequence number.
Event = tuple[str, Document]


@dataclass
class _OpenItem:
    """The item that the answer is writing at present."""

    index: int  # among the items of the output
    item: Item  # without its text
    delta: str  # type of the events with pieces of the text; `….done` ends it
    place: Document = field(default_factory=dict)  # index of the part that holds the text
    part: Document | None = None  # that part, without its text
    part_event: str = ""  # type of the events that begin and end the part
    parts: str = ""  # key of the item's parts
    text_key: str = "text"
    pieces: list[str] = field(default_factory=list)
    log_probs: list[Document] = field(default_factory=list)

    def start(self) -> Iterator[Event]:
        empty = {self.text_key: ""} if self.part is None else {}
        yield (
            "response.output_item.added",
            {
                "output_index": self.index,
                "item": {**self.item, **empty, "status": "in_progress"},
            },
        )
        if self.part is not None:
            yield f"{self.part_event}.added", {**self._where(), "part": {**self.part, "text": ""}}

    def add(self, text: str, log_probs: list[Document]) -> Iterator[Event]:
        self.pieces.append(text)
        self.log_probs += log_probs
        yield f"{self.delta}.delta", {**self._where(), "delta": text, **self._scores(log_probs)}

    def finish(self, status: str) -> Iterator[Event]:
        text = "".join(self.pieces)
        scores = self._scores(self.log_probs)
        name = {"name": self.item["name"]} if "name" in self.item else {}
        yield f"{self.delta}.done", {**self._where(), **name, self.text_key: text, **scores}
        if self.part is None:
            self.item[self.text_key] = text
        else:
            part = {**self.part, "text": text, **scores}
            self.item[self.parts] = [part]
            yield f"{self.part_event}.done", {**self._where(), "part": part}
        self.item["status"] = status
        yield "response.output_item.done", {"output_index": self.index, "item": self.item}

    def _where(self) -> Document:
        return {"item_id": self.item["id"], "output_index": self.index, **self.place}

    def _scores(self, log_probs: list[Document]) -> Document:
        return {"logprobs": log_probs} if self.item["type"] == "message" else {}


def _message(index: int) -> _OpenItem:
    item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    return _OpenItem(
        index,
        item,
        "response.output_text",
        {"content_index": 0},
        part,
        "response.content_part",
        "content",
    )


def _reasoning(index: int, summary: bool) -> _OpenItem:
    item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
    if summary:
        return _OpenItem(
            index,
            item,
            "response.reasoning_summary_text",
            {"summary_index": 0},
            {"type": "summary_text"},
            "response.reasoning_summary_part",
            "summary",
        )
    return _OpenItem(
        index,
        item,
        "response.reasoning_text",
        {"content_index": 0},
        {"type": "reasoning_text"},
        "response.content_part",
        "content",
    )


def _call(index: int, start: CallStart) -> _OpenItem:
    item = {
        "id": new_id("fc"),
        "type": "function_call",
        "call_id": start.id,
        "name": start.name,
    }
    return _OpenItem(index, item, "response.function_call_arguments", text_key="arguments")


@dataclass
class Output:
    """The output of a response. A change between text, reasoning and calls begins a new item."""

    summary: bool  # reasoning is written as its own summary
    items: list[Item] = field(default_factory=list)  # finished items
    _open: _OpenItem | None = None
    _log_probs: list[Document] = field(default_factory=list)  # not yet sent with a text

    def push(self, parts: Iterable[Part], log_probs: list[Document]) -> Iterator[Event]:
        """Yield the events of the next parts. `log_probs`: those of the tokens since the last."""
        self._log_probs += log_probs
        for part in parts:
            match part:
                case str():
                    yield from self._switch("message", _message)
                    yield from self._add(part)
                case Reasoning():
                    yield from self._switch("reasoning", _reasoning, self.summary)
                    yield from self._add(part.text)
                case CallStart():
                    yield from self._close("completed")
                    yield from self._begin(_call(len(self.items), part))
                case CallArguments():
                    yield from self._add(part.text)

    def finish(self, status: str) -> Iterator[Event]:
        """Yield the events that end the output. An empty answer is an empty message."""
        if self._open is None and not self.items:
            yield from self._switch("message", _message)
        yield from self._close(status)

    def _switch(self, kind: str, create: Any, *options: Any) -> Iterator[Event]:
        if self._open is None or self._open.item["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(create(len(self.items), *options))

    def _begin(self, item: _OpenItem) -> Iterator[Event]:
        self._open = item
        yield from item.start()

    def _add(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        log_probs: list[Document] = []
        if self._open.item["type"] == "message":
            log_probs = self._log_probs
            self._log_probs = []
        yield from self._open.add(text, log_probs)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.finish(status)
            self.items.append(self._open.item)
            self._open = None
