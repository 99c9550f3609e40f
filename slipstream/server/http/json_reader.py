"""Request bodies read as Triton's JSON parser (rapidjson) reads them, errors and their offsets
included.

Python's own decoder does the work. When it refuses, or when something it is laxer about may be in
the body, the exact reader below goes over the bytes again: it accepts a byte-order mark, NaN and
bytes that are not UTF-8, and says what rapidjson says about everything else.
"""

from __future__ import annotations

import json
import re
from typing import Any

from slipstream.server.kserve.errors import Code, InferenceError

MAX_DEPTH = 128  # rapidjson has no limit of its own, and falls over a stack; requests need 3
MAX_NUMBER_DIGITS = 4000
_WHITE = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_DIGITS = re.compile(rb"[0-9]*")
_ESCAPES = {
    ord('"'): b'"',
    ord("\\"): b"\\",
    ord("/"): b"/",
    ord("b"): b"\b",
    ord("f"): b"\f",
    ord("n"): b"\n",
    ord("r"): b"\r",
    ord("t"): b"\t",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Members(list[tuple[str, Any]]):
    """A JSON object as it was written: pairs, in order, repeated names included."""

    def first(self) -> dict[str, Any]:
        """By name; of a repeated one the first, as rapidjson finds it."""
        return dict(reversed(self))

    def get(self, name: str) -> Any:
        return self.first().get(name)


def parse_json(body: bytes) -> Any:
    """Members, list, str, int, float, bool or None. InferenceError says what is wrong, and where."""
    try:
        text = body.decode("utf-8").strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return _Reader(body).document()
    if end != len(text):
        return _Reader(body).document()
    nested = body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _shallow(value)
    if nested or (b"\\u" in body and not _encodable(value)):
        return _Reader(body).document()
    return value


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("too big")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=Members, parse_float=_finite)


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child for parent in level for child in _children(parent) if isinstance(child, list)
        ]
        if not level:
            return True
    return False


def _encodable(value: Any) -> bool:
    """Half a surrogate pair cannot be written as UTF-8, and rapidjson refuses it where it stands."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                return False
        else:
            waiting.extend(_children(item))
            if isinstance(item, Members):
                waiting.extend(name for name, _ in item)
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, Members):
        return [child for _, child in value]
    return value if isinstance(value, list) else []


class _Reader:
    """rapidjson's grammar, order of checks and error offsets. The zero byte at the end is its end
    of input.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body + b"\0"
        self.position = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
        self.depth = 0

    @property
    def peek(self) -> int:
        return self.body[self.position]

    def fail(self, text: str, position: int | None = None) -> InferenceError:
        where = self.position if position is None else position
        return InferenceError(
            f"failed to parse the request JSON buffer: {text} at {where}", Code.INTERNAL
        )

    def skip_white(self) -> None:
        match = _WHITE.match(self.body, self.position)
        assert match is not None
        self.position = match.end()

    def accept(self, character: str) -> bool:
        if self.peek == ord(character):
            self.position += 1
            return True
        return False

    def document(self) -> Any:
        self.skip_white()
        if self.peek == 0:
            raise self.fail("The document is empty.")
        value = self.value()
        self.skip_white()
        if self.peek != 0:
            raise self.fail("The document root must not be followed by other values.")
        return value

    def value(self) -> Any:
        first = chr(self.peek)
        if first in "{[":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.fail(f"More than {MAX_DEPTH} levels of arrays and objects.")
            value = self.members() if first == "{" else self.array()
            self.depth -= 1
            return value
        if first == '"':
            return self.string()
        for word, meaning in (("null", None), ("true", True), ("false", False)):
            if first == word[0]:
                self.word(word)
                return meaning
        return self.number()

    def word(self, word: str) -> None:
        for character in word:
            if not self.accept(character):
                raise self.fail("Invalid value.")

    def members(self) -> Members:
        self.position += 1
        self.skip_white()
        found = Members()
        if self.accept("}"):
            return found
        while True:
            if self.peek != ord('"'):
                raise self.fail("Missing a name for object member.")
            name = self.string()
            self.skip_white()
            if not self.accept(":"):
                raise self.fail("Missing a colon after a name of object member.")
            self.skip_white()
            found.append((name, self.value()))
            self.skip_white()
            if self.accept("}"):
                return found
            if not self.accept(","):
                raise self.fail("Missing a comma or '}' after an object member.")
            self.skip_white()

    def array(self) -> list[Any]:
        self.position += 1
        self.skip_white()
        found: list[Any] = []
        if self.accept("]"):
            return found
        while True:
            found.append(self.value())
            self.skip_white()
            if self.accept("]"):
                return found
            if not self.accept(","):
                raise self.fail("Missing a comma or ']' after an array element.")
            self.skip_white()

    def string(self) -> str:
        self.position += 1
        pieces = []
        while True:
            match = _PLAIN.match(self.body, self.position)
            assert match is not None
            pieces.append(match.group())
            self.position = match.end()
            if self.accept('"'):
                return b"".join(pieces).decode("utf-8", "surrogateescape")
            if self.peek == 0:
                raise self.fail("Missing a closing quotation mark in string.")
            if self.peek != ord("\\"):
                raise self.fail("Invalid encoding in string.")
            pieces.append(self.escape())

    def escape(self) -> bytes:
        start = self.position
        self.position += 1
        if self.accept("u"):
            return chr(self.code_point(start)).encode("utf-8")
        if self.peek not in _ESCAPES:
            raise self.fail("Invalid escape character in string.", start)
        self.position += 1
        return _ESCAPES[self.body[self.position - 1]]

    def code_point(self, start: int) -> int:
        code = self.hex4(start)
        if not 0xD800 <= code <= 0xDFFF:
            return code
        if code > 0xDBFF or not (self.accept("\\") and self.accept("u")):
            raise self.fail("The surrogate pair in string is invalid.", start)
        low = self.hex4(start)
        if not 0xDC00 <= low <= 0xDFFF:
            raise self.fail("The surrogate pair in string is invalid.", start)
        return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)

    def hex4(self, start: int) -> int:
        match = _HEX.match(self.body, self.position)
        if match is None:
            raise self.fail("Incorrect hex digit after \\u escape in string.", start)
        self.position = match.end()
        return int(match.group(), 16)

    def number(self) -> int | float:
        start = self.position
        negative = self.accept("-")
        if chr(self.peek) in "NI":
            return self.not_finite(negative)
        if not self.accept("0") and not self.digits():
            raise self.fail("Invalid value.")
        whole = True
        if self.accept("."):
            whole = False
            if not self.digits():
                raise self.fail("Miss fraction part in number.")
        if self.accept("e") or self.accept("E"):
            whole = False
            if not self.accept("+"):
                self.accept("-")
            if not self.digits():
                raise self.fail("Miss exponent in number.")
        return self.numeral(start, whole)

    def digits(self) -> bool:
        match = _DIGITS.match(self.body, self.position)
        assert match is not None
        found = match.end() > self.position
        self.position = match.end()
        return found

    def numeral(self, start: int, whole: bool) -> int | float:
        text = self.body[start : self.position]
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise self.fail("Number too big to be stored in double.", start)
        return int(text) if whole and len(text) < MAX_NUMBER_DIGITS else number

    def not_finite(self, negative: bool) -> float:
        if self.accept("N"):
            self.word("aN")
            return float("nan")
        self.word("Inf")
        if self.peek == ord("i"):
            self.word("inity")
        return float("-inf") if negative else float("inf")
