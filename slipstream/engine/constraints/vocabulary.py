"""What each token of a vocabulary writes. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class Vocabulary(NamedTuple):
    """The text of tokens is their bytes, one after the other."""

    texts: list[bytes]  # by token; b"" for those that write nothing
    special: frozenset[int]  # marks that are never text, whatever their bytes
    strips_space: bool = False  # a space at the very beginning of a text is left out

    @property
    def mask_bytes(self) -> int:
        """Of a mask with a bit for each token, in whole 32-bit words."""
        return -(-len(self.texts) // 32) * 4
