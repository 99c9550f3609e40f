"""Reads long JSON in short pieces, so that other threads run in between.

Python's own decoder holds the interpreter's lock from the first byte to the last, and so the event
loop. `PieceReader` uses it for pieces of at most 64 Ki characters. It accepts what the decoder
accepts. An error is a ValueError without a place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

# Characters from which JSON is read in pieces.
LONG_JSON = 1 << 16
_PIECE = 1 << 16
_WHITE = re.compile(r"[ \t\n\r]*")
_FIRST = frozenset("-0123456789[")
_NUMBERS = re.compile(r"[-+0-9.eE,\[\] \t\n\r]*")
# The characters of a string up to its end. An escape, or a pair of them that is one character, is
# matched as a whole or not at all.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}"""
    r"""|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))*+"""  # half a pair before another character
)

_MAX_NESTED = 400
# of an array and of an object in a request without tensors
_MAX_ELEMENTS = 1 << 20
_MAX_MEMBERS = 1 << 16

Piece = list[Any] | npt.NDArray[np.int64]
Pairs = list[tuple[str, Any]]


class TooManyElements(ValueError):
    """A valid document has an array or an object with more elements than any request needs."""


def decode_json(body: bytes) -> Any:
    """Return the value of a JSON document: msgspec's, or for a long one the same in pieces.

    Raise ValueError, RecursionError or msgspec.DecodeError where it is not valid, TooManyElements
    where it has more than any request needs.
    """
    if len(body) <= LONG_JSON:
        return msgspec.json.decode(body)
    reader = PieceReader(body.decode(), _PLAIN, dict, _MAX_NESTED, False, _MAX_ELEMENTS)
    value = reader.read()
    if has_unicode_escape(body):
        _check_encodable(value)
    return value


def has_unicode_escape(body: bytes) -> bool:
    """Return whether a document may hold an escape that is half a surrogate pair."""
    starts = range(0, len(body), _PIECE)
    return any(b"\\u" in body[start : start + _PIECE + 1] for start in starts)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


_PLAIN = json.JSONDecoder(parse_constant=_refuse_constant)


def _check_encodable(value: Any) -> None:
    """Raise ValueError where a string holds half a surrogate pair, which UTF-8 cannot."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


class LongArray:
    """A long JSON array, as pieces of values. Nested arrays of numbers are flattened."""

    def __init__(self) -> None:
        self.count = 0  # elements; some may be arrays
        self.pieces: list[Piece] = []

    def add(self, elements: list[Any], nested: int) -> None:
        """Append elements. `nested`: how deep they are arrays of numbers."""
        self.count += len(elements)
        for _ in range(nested):
            elements = _flatten_once(elements)
        if elements:
            self.pieces.append(_compact(elements))

    def head(self) -> list[Any]:
        """Return the first values, enough to see that they are no objects."""
        return list(self.pieces[0][:16]) if self.pieces else []


class _Run(NamedTuple):
    """Elements of an array that were read at once."""

    values: list[Any]
    nested: int  # how deep they are arrays
    more: bool  # whether the array continues
    position: int  # of what comes next


class PieceReader:
    """Reads one document. `long_arrays`: arrays of numbers over a piece become LongArray."""

    def __init__(
        self,
        text: str,
        decoder: json.JSONDecoder,
        make_object: Callable[[Pairs], Any],
        most_nested: int,
        long_arrays: bool,
        most_elements: int | None = None,
    ) -> None:
        self._text = text
        self._decode = decoder.raw_decode
        self._make_object = make_object
        self._most_nested = most_nested
        self._long_arrays = long_arrays
        self._most_elements = most_elements

    def read(self) -> Any:
        value, end = self._value(self._skip_white(0), 0)
        if self._skip_white(end) != len(self._text):
            raise ValueError("data after the document")
        return value

    def _skip_white(self, position: int) -> int:
        match = _WHITE.match(self._text, position)
        assert match is not None
        return match.end()

    def _value(self, position: int, depth: int) -> tuple[Any, int]:
        """Return the value at a position, and the position after it."""
        first = self._text[position : position + 1]
        if first == '"':
            return self._string(position)
        if first not in ("[", "{"):
            return self._decode(self._text, position)
        if depth >= self._most_nested:
            raise ValueError(f"more than {self._most_nested} levels of arrays and objects")
        if first == "{":
            return self._object(position + 1, depth + 1)
        return self._array(position + 1, depth + 1)

    def _string(self, position: int) -> tuple[str, int]:
        """Return the string whose opening quote is at a position, and the position after it."""
        text = self._text
        quote = text.find('"', position + 1, position + _PIECE)
        if quote >= 0 and text[quote - 1] != "\\":  # a short string
            value, end = self._decode(text, position)
            return value, end
        parts: list[str] = []
        start = position + 1
        while True:
            match = _CHARACTERS.match(text, start, start + _PIECE)
            assert match is not None
            cut = match.end()
            if cut == start and text[cut : cut + 1] != '"':  # an escape that the decoder may accept
                cut = len(text)
            piece = text[start:cut]
            part, end = self._decode(f'"{piece}"', 0)
            parts.append(part)
            if end < len(piece) + 2:  # the string ends before the quote that was added
                return "".join(parts), start + end - 1
            if text[cut : cut + 1] == '"':
                return "".join(parts), cut + 1
            if cut == len(text):
                raise ValueError("a closing quote is missing")
            start = cut

    def _object(self, position: int, depth: int) -> tuple[Any, int]:
        text = self._text
        pairs: Pairs = []
        position = self._skip_white(position)
        if text[position : position + 1] == "}":
            return self._make_object(pairs), position + 1
        while True:
            if text[position : position + 1] != '"':
                raise ValueError("a name of a member is missing")
            name, position = self._string(position)
            position = self._skip_white(position)
            if text[position : position + 1] != ":":
                raise ValueError("a colon after a name is missing")
            value, position = self._value(self._skip_white(position + 1), depth)
            pairs.append((name, value))
            if self._most_elements is not None and len(pairs) > _MAX_MEMBERS:
                raise TooManyElements(f"an object of over {_MAX_MEMBERS} members")
            more, position = self._separator(position, "}")
            if not more:
                return self._make_object(pairs), position

    def _separator(self, position: int, close: str) -> tuple[bool, int]:
        """Return whether a comma follows, and the position of what comes next."""
        position = self._skip_white(position)
        found = self._text[position : position + 1]
        if found not in (",", close) or not found:
            raise ValueError(f"a comma or {close!r} is missing")
        more = found == ","
        return more, self._skip_white(position + 1) if more else position + 1

    def _array(self, position: int, depth: int) -> tuple[list[Any] | LongArray, int]:
        elements: list[Any] = []
        long = LongArray()
        position = self._skip_white(position)
        if self._text[position : position + 1] == "]":
            return elements, position + 1
        more = True
        while more:
            run = self._read_numbers(position, depth)
            if run is None:
                value, position = self._value(position, depth)
                elements.append(value)
                more, position = self._separator(position, "]")
            else:
                is_long = bool(long.pieces) or (run.more and run.position - position > _PIECE // 2)
                if self._long_arrays and is_long:
                    long.add(elements, 0)
                    elements = []
                    long.add(run.values, run.nested)
                else:
                    elements += run.values
                more = run.more
                position = run.position
            if self._most_elements is not None and len(elements) > self._most_elements:
                raise TooManyElements(f"an array of over {self._most_elements} elements")
        if not long.pieces:
            return elements, position
        long.add(elements, 0)
        return long, position

    def _read_numbers(self, position: int, depth: int) -> _Run | None:
        """Return the next numbers, or arrays of numbers, of an array; None if there are none.

        They end with the array, or before an element that does not fit into a piece.
        """
        if self._text[position : position + 1] not in _FIRST:
            return None
        match = _NUMBERS.match(self._text, position, position + _PIECE)
        assert match is not None
        piece = match.group()
        closed, end, nested = _find_end(piece)
        if end < 0:
            return None
        if depth + nested > self._most_nested:
            raise ValueError(f"more than {self._most_nested} levels of arrays and objects")
        values, _ = self._decode(f"[{piece[:end]}]", 0)
        if not values:
            raise ValueError("an element is missing")
        after = position + end + 1
        return _Run(values, nested, not closed, after if closed else self._skip_white(after))


def _find_end(piece: str) -> tuple[bool, int, int]:
    """Return where the elements of an array end in a piece of it.

    The result is whether the array ends there, the position of its end or else of the last comma
    between elements, -1 if there is none, and how deep the elements are nested.
    """
    if "[" not in piece:
        end = piece.find("]")
        return end >= 0, end if end >= 0 else piece.rfind(","), 0
    letters = np.frombuffer(piece.encode(), np.uint8)
    steps = (letters == ord("[")).astype(np.int8) - (letters == ord("]"))
    depths = np.cumsum(steps, dtype=np.int32)
    ends = np.flatnonzero(depths < 0)
    if len(ends):
        end = int(ends[0])
        return True, end, int(depths[:end].max(initial=0))
    commas = np.flatnonzero((letters == ord(",")) & (depths == 0))
    end = int(commas[-1]) if len(commas) else -1
    return False, end, int(depths[: max(0, end)].max(initial=0))


def _flatten_once(elements: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for element in elements:
        if type(element) is list:
            flat += element
        else:
            flat.append(element)
    return flat


def _compact(values: list[Any]) -> Piece:
    """Return integers as an array, which takes a quarter of the memory."""
    if set(map(type, values)) == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(values, np.int64)
    return values
