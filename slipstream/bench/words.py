"""Counting and cutting text in tokens for load generators: with a tokenizer of one's own, or the
server's.
"""

from __future__ import annotations

from typing import Protocol

from slipstream.client.connection import Connection
from slipstream.client.words import ServerWords
from slipstream.server.text.tokenizer import Tokenizer


class Words(Protocol):
    def encode(self, text: str) -> list[int]:
        """Without the tokens that begin and end a text."""

    def decode(self, tokens: list[int]) -> str: ...


class OwnWords:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class WordsOfServer:
    """The server's preprocessing and postprocessing; what every text begins with is found out once
    and left off.
    """

    def __init__(self, connection: Connection) -> None:
        self._words = ServerWords(connection)
        one, other = (self._words.encode(text).tokens for text in ("a", "b"))
        same = [first == second for first, second in zip(one, other, strict=False)]
        self._prefix = same.index(False) if False in same else 0

    def encode(self, text: str) -> list[int]:
        return self._words.encode(text).tokens[self._prefix :] if text else []

    def decode(self, tokens: list[int]) -> str:
        return self._words.decode(tokens)
