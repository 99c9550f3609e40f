"""Compresses and decompresses bodies with gzip and deflate, within a limit on their size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from slipstream.server.http.exchange import Buffer
from slipstream.server.kserve.errors import Code, InferenceError, PlainTextError

_WINDOW = {"gzip": 31, "deflate": 15}
_EITHER = 47  # gzip or zlib, whichever the data begins with


def decompress(encoding: str, body: bytes, limit: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW:
        raise PlainTextError("Unsupported compression type", Code.UNSUPPORTED)
    reader = zlib.decompressobj(_EITHER)
    try:
        data = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise InferenceError(f"the request's body is not {encoding} data: {error}") from error
    if len(data) > limit:
        raise InferenceError(
            f"the request's body has more than {limit} bytes when it is decompressed"
        )
    if not reader.eof or reader.unused_data:
        raise InferenceError(
            f"the request's body is not {encoding} data: it is cut short or followed by other data"
        )
    return data


def compress(encoding: str, pieces: Iterable[Buffer]) -> list[Buffer]:
    """Return a compressed body in pieces."""
    writer = zlib.compressobj(wbits=_WINDOW[encoding])
    return [*map(writer.compress, pieces), writer.flush()]


def compress_stream(encoding: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a compressed body while its pieces come."""
    writer = zlib.compressobj(wbits=_WINDOW[encoding])
    for piece in pieces:
        yield writer.compress(piece)
    yield writer.flush()


def choose_encoding(accepted: str) -> str:
    """Return gzip or deflate, whichever an Accept-Encoding header prefers.

    The result is empty where the header prefers the body without compression.
    """
    qualities: dict[str, float] = {}
    for part in accepted.split(","):
        name, _, parameters = part.strip().partition(";")
        qualities.setdefault(name.strip().lower(), _quality(parameters))
    known = [
        name
        for name in ("gzip", "deflate")
        if qualities.get(name, 0.0) > qualities.get("identity", 0.0)
    ]
    return max(known, key=lambda name: qualities[name], default="")


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
