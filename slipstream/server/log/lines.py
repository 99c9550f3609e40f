"""Lines out of what another process prints."""

from __future__ import annotations

# of a line; one that is longer is given out in pieces, for it may have no end at all
MOST_BYTES = 1 << 16


class LineCutter:
    """Each byte is looked at once, when it comes."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def push(self, data: bytes) -> list[str]:
        """The lines that are whole now. Empty data is the end: what is left is a line, too."""
        if not data:
            return [self._take()] if self._begun else []
        lines: list[str] = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            lines += self._add(part)
            lines.append(self._take())
        return lines + self._add(rest)

    def _add(self, part: bytes) -> list[str]:
        """The pieces that are too much."""
        self._begun += part
        pieces = []
        while len(self._begun) > MOST_BYTES:
            # A character's further bytes are 10xxxxxx; there are three at most.
            ends = (
                size
                for size in range(MOST_BYTES, MOST_BYTES - 4, -1)
                if self._begun[size] & 0xC0 != 0x80
            )
            size = next(ends, MOST_BYTES)
            pieces.append(self._begun[:size].decode("utf-8", "replace"))
            del self._begun[:size]
        return pieces

    def _take(self) -> str:
        text = self._begun.decode("utf-8", "replace").rstrip("\r")
        self._begun.clear()
        return text
