"""The text of each token of a vocabulary. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class Vocabulary(NamedTuple):
    """The text of several tokens is the concatenation of their bytes."""

    texts: list[bytes]  # by token; b"" for tokens without text
    special: frozenset[int]  # tokens that are never text, whatever their bytes
    strips_space: bool = False  # a space at the very beginning of a text is removed

    @property
    def mask_bytes(self) -> int:
        """The size of a mask with one bit per token, in whole 32-bit words."""
        return -(-len(self.texts) // 32) * 4
