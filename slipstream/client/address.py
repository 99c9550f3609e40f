"""The address of a server, as users write it."""

from __future__ import annotations

import re

_FORM = "give HOST:PORT, like localhost:8000"
_SCHEMES = ("http", "https", "grpc")
_SCHEME = re.compile(r"(?i)([a-z][a-z0-9+.-]*)://")
# a name or an IPv4 address, or an IPv6 address in brackets; then a port
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[^\s:/\[\]@?#]+)(?::(.*))?")
_LARGEST_PORT = 65535


class AddressError(ValueError):
    """A text is not the address of a server."""


def read_address(text: str, port: int | None = None) -> str:
    """Return HOST:PORT of a server, with `https://` before it if the text has that.

    port: that of an address without one; None: it must have one
    """
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() not in _SCHEMES:
        raise AddressError(f"address '{text}': {scheme[0]} is not http:// or https://; {_FORM}")
    place = text[scheme.end() if scheme else 0 :].rstrip("/")
    found = _PLACE.fullmatch(place)
    if found is None:
        hint = "an IPv6 address needs brackets, like [::1]:8000" if _is_ipv6(place) else _FORM
        raise AddressError(f"address '{text}' is not that of a server: {hint}")
    start = "https://" if scheme and scheme[1].lower() == "https" else ""
    if found[2] is None and port is None:
        raise AddressError(f"address '{text}' has no port; {_FORM}")
    return f"{start}{found[1]}:{_read_port(text, found[2], port)}"


def _read_port(text: str, written: str | None, port: int | None) -> int:
    digits = str(port) if written is None else written
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 0 < int(digits) <= _LARGEST_PORT:
        raise AddressError(
            f"address '{text}': port '{digits}' is not a number from 1 to {_LARGEST_PORT}; {_FORM}"
        )
    return int(digits)


def _is_ipv6(place: str) -> bool:
    return place.count(":") > 1 and not re.search(r"[^0-9A-Fa-f:.%]", place)
