"""Tokenization for load generators: a local tokenizer, the server's text models, or words."""

from __future__ import annotations

from typing import Protocol

from slipstream.client.connection import Connection
from slipstream.client.text_models import ServerTokenizer
from slipstream.server.text.tokenizer import Tokenizer


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without BOS and EOS."""

    def decode(self, tokens: list[int]) -> str: ...


class LocalTextTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class ServerTextTokenizer:
    """The server's text models, without the tokens that they put before every text."""

    def __init__(self, connection: Connection) -> None:
        self._models = ServerTokenizer(connection)
        first = self._models.encode("a").tokens
        second = self._models.encode("b").tokens
        equal = [one == other for one, other in zip(first, second, strict=False)]
        self._prefix_length = equal.index(False) if False in equal else 0

    def encode(self, text: str) -> list[int]:
        return self._models.encode(text).tokens[self._prefix_length :] if text else []

    def decode(self, tokens: list[int]) -> str:
        return self._models.decode(tokens)


class WordTokenizer:
    """One token for each word, for models whose tokenizer is not known."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self._words[token] for token in tokens)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]
