"""Frames on a stream between two processes of a server: a length, a byte for the kind, content."""

from __future__ import annotations

import asyncio
import struct
from typing import NamedTuple

_HEAD = struct.Struct(">Ic")
_DROPPED_BYTES = 1 << 16


class Frame(NamedTuple):
    kind: bytes
    content: bytes


class FrameStream:
    """One end of a stream of frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> Frame | None:
        """Return the next frame; None at the end of the stream."""
        try:
            length, kind = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            return Frame(kind, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def write(self, kind: bytes, content: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack_frame(kind, content))

    async def drain(self) -> None:
        """Wait until the other end has read enough. Raises OSError if it has disconnected."""
        await self._writer.drain()

    async def read_to_end(self, seconds: float) -> None:
        """Read and drop everything until the other end closes, at most for this long.

        A socket that is closed before all is read loses what was written to it: the other end gets
        a reset in place of the last frames.
        """
        try:
            async with asyncio.timeout(seconds):
                while await self._reader.read(_DROPPED_BYTES):
                    pass
        except (TimeoutError, OSError):
            return

    def close(self) -> None:
        self._writer.close()


def pack_frame(kind: bytes, content: bytes) -> bytes:
    return _HEAD.pack(len(content), kind) + content
