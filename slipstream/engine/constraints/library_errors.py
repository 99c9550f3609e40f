"""The errors of llguidance, in one line and without its own source texts."""

from __future__ import annotations

import re
from typing import Any

_NO_TOKEN_ALLOWED = "NoExtensionBias"  # the library's error text
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # the library's: line and column
_PANIC = "panic"  # errors that begin with it hold a backtrace
_TOO_LARGE = "it is too large for the grammar library"


def reason(matcher: Any) -> str:
    """Return the matcher's error without the parser's state."""
    error = one_line(without_panic(matcher.get_error()).partition("<state>")[0])
    return "no token can come next" if error == _NO_TOKEN_ALLOWED else error


def without_panic(message: str) -> str:
    """Return an error without the source text and the backtrace of the library's own failure."""
    return _TOO_LARGE if message.lstrip().startswith(_PANIC) else message


def without_excerpt(message: str) -> str:
    """Return an error without the place in the grammar, which is not the client's text."""
    return _PLACE.sub("", message.partition("\n")[0])


def one_line(text: str) -> str:
    return " ".join(text.split())[:500]
