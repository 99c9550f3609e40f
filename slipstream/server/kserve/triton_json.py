"""JSON as Triton (rapidjson) reads and writes it.

Reading: Python's decoder does the work. Where it fails, or where the body may hold something that
only rapidjson refuses, `ExactReader` parses the bytes again. It accepts a byte-order mark, NaN and
bytes that are not UTF-8, and reports every error with rapidjson's text and offset. Recordings of
Triton hold both.

Writing: no spaces, UTF-8 unescaped, control characters as \\u00XX, shortest doubles. Strings are
bytes: a model's text may hold bytes that are not UTF-8, and Triton passes them on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.long_json import LONG_JSON, PieceReader, has_unicode_escape

_AT_ONCE = 65536  # bytes of a string
VALUES_AT_ONCE = 16384  # values that are written as one piece
_GROUP = 1024  # values that are tried without a look at each of them
_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
_SHORT = {
    b'"': b'\\"',
    b"\\": b"\\\\",
    b"\b": b"\\b",
    b"\f": b"\\f",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
}
_NOT_FINITE = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}
_ESCAPED = {bytes([code]): b"\\u%04X" % code for code in range(0x20)} | _SHORT
MAX_DEPTH = 400  # rapidjson has no limit and overflows its stack; requests need 3
MAX_NUMBER_DIGITS = 4000
_WHITE = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_INTEGER = re.compile(r"\s*[+-]?[0-9]+")
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
    """A JSON object as (name, value) pairs in their order, with repeated names."""

    def first(self) -> dict[str, Any]:
        """Return the values by name. For a repeated name it is the first value, as in rapidjson."""
        return dict(reversed(self))

    def get(self, name: str) -> Any:
        return self.first().get(name)


def parse_json(body: bytes) -> Any:
    """Return Members, list, LongArray, str, int, float, bool or None.

    InferenceError names the place of an error.
    """
    if len(body) > LONG_JSON:
        return _parse_long_json(body)
    try:
        text = body.decode("utf-8").strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return ExactReader(body).parse_document()
    if end != len(text):
        return ExactReader(body).parse_document()
    nested = body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _is_shallow(value)
    if nested or (b"\\u" in body and not _is_encodable(value)):
        return ExactReader(body).parse_document()
    return value


def _parse_long_json(body: bytes) -> Any:
    """Parse a long body in pieces. Long arrays of numbers become LongArray."""
    try:
        reader = PieceReader(body.decode("utf-8"), _DECODER, Members, MAX_DEPTH, True)
        value = reader.read()
    except (ValueError, RecursionError):
        return ExactReader(body).parse_document()
    if has_unicode_escape(body) and not _is_encodable(value):
        return ExactReader(body).parse_document()
    return value


def _parse_finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=Members, parse_float=_parse_finite)


def _is_shallow(value: Any) -> bool:
    """Return whether arrays and objects are nested at most MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for parent in level:
            children += [child for child in _children(parent) if isinstance(child, list)]
        if not children:
            return True
        level = children
    return False


def _is_encodable(value: Any) -> bool:
    """Return False where a string holds half a surrogate pair, which UTF-8 cannot."""
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


class ExactReader:
    """A parser with rapidjson's grammar, order of checks and error offsets.

    A zero byte marks the end of the input.
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

    def parse_document(self) -> Any:
        self.skip_white()
        if self.peek == 0:
            raise self.fail("The document is empty.")
        value = self.parse_value()
        self.skip_white()
        if self.peek != 0:
            raise self.fail("The document root must not be followed by other values.")
        return value

    def parse_value(self) -> Any:
        first = chr(self.peek)
        if first in "{[":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.fail(f"More than {MAX_DEPTH} levels of arrays and objects.")
            value = self.parse_object() if first == "{" else self.parse_array()
            self.depth -= 1
            return value
        if first == '"':
            return self.parse_string()
        for word, meaning in (("null", None), ("true", True), ("false", False)):
            if first == word[0]:
                self.expect_word(word)
                return meaning
        return self.parse_number()

    def expect_word(self, word: str) -> None:
        for character in word:
            if not self.accept(character):
                raise self.fail("Invalid value.")

    def parse_object(self) -> Members:
        self.position += 1
        self.skip_white()
        found = Members()
        if self.accept("}"):
            return found
        while True:
            if self.peek != ord('"'):
                raise self.fail("Missing a name for object member.")
            name = self.parse_string()
            self.skip_white()
            if not self.accept(":"):
                raise self.fail("Missing a colon after a name of object member.")
            self.skip_white()
            found.append((name, self.parse_value()))
            self.skip_white()
            if self.accept("}"):
                return found
            if not self.accept(","):
                raise self.fail("Missing a comma or '}' after an object member.")
            self.skip_white()

    def parse_array(self) -> list[Any]:
        self.position += 1
        self.skip_white()
        found: list[Any] = []
        if self.accept("]"):
            return found
        while True:
            found.append(self.parse_value())
            self.skip_white()
            if self.accept("]"):
                return found
            if not self.accept(","):
                raise self.fail("Missing a comma or ']' after an array element.")
            self.skip_white()

    def parse_string(self) -> str:
        self.position += 1
        pieces = []
        while True:
            match = _PLAIN.match(self.body, self.position, self.position + _AT_ONCE)
            assert match is not None
            pieces.append(match.group())
            self.position = match.end()
            if len(pieces[-1]) == _AT_ONCE:
                continue
            if self.accept('"'):
                return b"".join(pieces).decode("utf-8", "surrogateescape")
            if self.peek == 0:
                raise self.fail("Missing a closing quotation mark in string.")
            if self.peek != ord("\\"):
                raise self.fail("Invalid escape character in string.")
            pieces.append(self.parse_escape())

    def parse_escape(self) -> bytes:
        start = self.position
        self.position += 1
        if self.accept("u"):
            return chr(self.parse_code_point(start)).encode("utf-8", "surrogatepass")
        if self.peek not in _ESCAPES:
            raise self.fail("Invalid escape character in string.", start)
        self.position += 1
        return _ESCAPES[self.body[self.position - 1]]

    def parse_code_point(self, start: int) -> int:
        code = self.parse_hex4(start)
        if not 0xD800 <= code <= 0xDBFF:
            return code  # rapidjson accepts the second half of a pair alone
        if not (self.accept("\\") and self.accept("u")):
            raise self.fail("The surrogate pair in string is invalid.", start)
        low = self.parse_hex4(start)
        if not 0xDC00 <= low <= 0xDFFF:
            raise self.fail("The surrogate pair in string is invalid.", start)
        return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)

    def parse_hex4(self, start: int) -> int:
        match = _HEX.match(self.body, self.position)
        if match is None:
            raise self.fail("Incorrect hex digit after \\u escape in string.", start)
        self.position = match.end()
        return int(match.group(), 16)

    def parse_number(self) -> int | float:
        start = self.position
        negative = self.accept("-")
        if chr(self.peek) in "NI":
            return self.parse_not_finite(negative)
        if not self.accept("0") and not self.skip_digits():
            raise self.fail("Invalid value.")
        whole = True
        if self.accept("."):
            whole = False
            if not self.skip_digits():
                raise self.fail("Miss fraction part in number.")
        if self.accept("e") or self.accept("E"):
            whole = False
            if not self.accept("+"):
                self.accept("-")
            if not self.skip_digits():
                raise self.fail("Miss exponent in number.")
        return self.convert_number(start, whole)

    def skip_digits(self) -> bool:
        match = _DIGITS.match(self.body, self.position)
        assert match is not None
        found = match.end() > self.position
        self.position = match.end()
        return found

    def convert_number(self, start: int, whole: bool) -> int | float:
        text = self.body[start : self.position]
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise self.fail("Number too big to be stored in double.", start)
        return int(text) if whole and len(text) < MAX_NUMBER_DIGITS else number

    def parse_not_finite(self, negative: bool) -> float:
        if self.accept("N"):
            self.expect_word("aN")
            return float("nan")
        self.expect_word("Inf")
        if self.peek == ord("i"):
            self.expect_word("inity")
        return float("-inf") if negative else float("inf")


def leading_integer(text: str) -> int | None:
    """Return the integer that a text begins with, as C reads it, or None."""
    match = _INTEGER.match(text)
    return int(match[0]) if match is not None and len(match[0]) < MAX_NUMBER_DIGITS else None


# -- writing


def write_string(text: bytes) -> bytes:
    if _SPECIAL.search(text) is not None:
        text = _SPECIAL.sub(lambda match: _ESCAPED[match.group()], text)
    return b'"' + text + b'"'


def write_double(number: float) -> bytes:
    """Return the shortest digits in rapidjson's layout, with an exponent from 1e21 on."""
    text = repr(number)
    if "e" not in text and "n" not in text:
        return text.encode()
    if not math.isfinite(number):
        return _NOT_FINITE[text]
    sign, digits, exponent = _decimal(text)
    if 0 < exponent <= 21:
        padded = digits.ljust(exponent, "0")
        return f"{sign}{padded[:exponent]}.{padded[exponent:] or '0'}".encode()
    if -6 < exponent <= 0:
        return f"{sign}0.{'0' * -exponent}{digits}".encode()
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{exponent - 1}".encode()


def _decimal(text: str) -> tuple[str, str, int]:
    """Return (sign, digits, exponent) of a number that is 0.digits × 10^exponent."""
    sign = "-" if text.startswith("-") else ""
    mantissa, _, power = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    return sign, (whole + fraction.rstrip("0")), len(whole) + int(power)


def write_scalar(value: Any) -> bytes:
    if isinstance(value, bytes):
        return write_string(value)
    if isinstance(value, float):
        return write_double(value)
    if isinstance(value, str):
        return write_string(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return b"null" if value is None else b"%d" % value


class Values(NamedTuple):
    """Values of a tensor in a document that is not written yet."""

    data: npt.NDArray[Any] | Sequence[Any]


Part = bytes | Values  # of a document


def write_parts(parts: Iterable[Part]) -> Iterator[bytes]:
    """Yield a document in pieces, so that neither it nor its values are in memory at once."""
    for part in parts:
        if isinstance(part, Values):
            yield from _write_values(part.data)
        else:
            yield part


def _write_values(values: npt.NDArray[Any] | Sequence[Any]) -> Iterator[bytes]:
    """Yield the values with commas between them."""
    for start in range(0, len(values), VALUES_AT_ONCE):
        end = min(start + VALUES_AT_ONCE, len(values))
        groups = [
            _write_group(values[first : min(first + _GROUP, end)])
            for first in range(start, end, _GROUP)
        ]
        yield (b"," if start else b"") + b",".join(groups)


def _write_group(values: npt.NDArray[Any] | Sequence[Any]) -> bytes:
    scalars = values.tolist() if isinstance(values, np.ndarray) else values
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        text = ",".join(map(repr, scalars))
        if "e" not in text and "n" not in text:  # no exponent, no NaN, no infinity
            return text.encode()
    return b",".join([write_scalar(value) for value in scalars])


def write_value(value: Any) -> bytes:
    if isinstance(value, Mapping):
        return write_object(value.items())
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join([write_value(item) for item in value]) + b"]"
    return write_scalar(value)


def write_object(pairs: Iterable[tuple[str, Any]]) -> bytes:
    return (
        b"{"
        + b",".join([write_scalar(name) + b":" + write_value(value) for name, value in pairs])
        + b"}"
    )


def write_error(message: str) -> bytes:
    return b'{"error":' + write_scalar(message) + b"}"
