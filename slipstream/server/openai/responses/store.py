"""Stored responses, in memory: the most recently used ones, up to a number and a size.

With several API keys each tenant finds its own responses only.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from slipstream.server.openai.responses.items import Item

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
_ITEM_BYTES = 256  # of the index of items, for each item


@dataclass(frozen=True, eq=False)
class Turn:
    """The items that one response added to a conversation, as JSON."""

    input: bytes
    output: bytes
    ids: Sequence[str]  # of all items

    @staticmethod
    def create(new: Sequence[Item], output: Sequence[Item]) -> Turn:
        ids = [item["id"] for item in (*new, *output)]
        return Turn(msgspec.json.encode(new), msgspec.json.encode(output), ids)

    @property
    def size(self) -> int:
        return len(self.input) + len(self.output) + _ITEM_BYTES * len(self.ids)

    def input_items(self) -> list[Item]:
        return msgspec.json.decode(self.input, type=list[Item])

    def items(self) -> list[Item]:
        return self.input_items() + msgspec.json.decode(self.output, type=list[Item])


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation. It does not need the responses before it to be stored."""

    id: str
    status: str
    background: bool
    document: bytes  # the response, as JSON
    turns: Sequence[Turn]  # the whole conversation; the last one belongs to this response

    def conversation(self) -> list[Item]:
        return [item for turn in self.turns for item in turn.items()]

    def input_items(self) -> list[Item]:
        """Return all items before the output of this response."""
        earlier = [item for turn in self.turns[:-1] for item in turn.items()]
        return earlier + self.turns[-1].input_items()


@dataclass
class ResponseStore:
    """Its methods may be called in any thread."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    bytes: int = 0
    # by (tenant, id); the least recently used is the first
    _responses: OrderedDict[tuple[str, str], StoredResponse] = field(default_factory=OrderedDict)
    _uses: Counter[Turn] = field(default_factory=Counter)  # responses that have a turn
    _items: dict[tuple[str, str], Turn] = field(default_factory=dict)  # by (tenant, item id)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._responses)

    def save(self, tenant: str, response: StoredResponse) -> None:
        """Store a response, and drop those that were not used for the longest time."""
        with self._lock:
            self._remove(tenant, response.id)
            self._responses[tenant, response.id] = response
            self.bytes += len(response.document)
            for turn in response.turns:
                self._uses[turn] += 1
                if self._uses[turn] == 1:
                    self.bytes += turn.size
                    self._items |= {(tenant, identity): turn for identity in turn.ids}
            while len(self._responses) > self.max_responses or self.bytes > self.max_bytes:
                self._remove(*next(iter(self._responses)))

    def find(self, tenant: str, identity: str) -> StoredResponse | None:
        with self._lock:
            found = self._responses.get((tenant, identity))
            if found is not None:
                self._responses.move_to_end((tenant, identity))
            return found

    def find_turn(self, tenant: str, item: str) -> Turn | None:
        """Return the turn that has an item."""
        with self._lock:
            return self._items.get((tenant, item))

    def delete(self, tenant: str, identity: str) -> bool:
        """Delete a response. Return whether there was one."""
        with self._lock:
            return self._remove(tenant, identity)

    def _remove(self, tenant: str, identity: str) -> bool:
        response = self._responses.pop((tenant, identity), None)
        if response is None:
            return False
        self.bytes -= len(response.document)
        for turn in response.turns:
            self._uses[turn] -= 1
            if not self._uses[turn]:
                del self._uses[turn]
                self.bytes -= turn.size
                for item in turn.ids:
                    if self._items.get((tenant, item)) is turn:
                        del self._items[tenant, item]
        return True


@dataclass
class ItemFinder:
    """Finds the stored items that one request refers to. A turn is decoded once."""

    store: ResponseStore
    tenant: str
    _items: dict[str, Item] = field(default_factory=dict)

    def find(self, identity: str) -> Item | None:
        if identity not in self._items:
            turn = self.store.find_turn(self.tenant, identity)
            if turn is not None:
                self._items |= {item["id"]: item for item in turn.items()}
        return self._items.get(identity)
