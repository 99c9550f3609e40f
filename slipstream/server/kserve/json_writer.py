"""Writes JSON like Triton: no spaces, UTF-8 unescaped, control characters as \\u00XX, shortest
doubles.

Strings are bytes here: a model's text may hold bytes that are not UTF-8, and Triton passes them on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_AT_ONCE = 65536
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


def write_values(values: npt.NDArray[Any] | Sequence[Any]) -> bytes:
    """Return the values with commas between them.

    Many are written piece by piece, so that not all of them are Python objects at once.
    """
    if len(values) <= _AT_ONCE:
        scalars = values.tolist() if isinstance(values, np.ndarray) else values
        return b",".join([write_scalar(value) for value in scalars])
    pieces = (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))
    return b",".join([write_values(piece) for piece in pieces])


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
