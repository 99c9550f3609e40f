"""The text of each token of a tokenizer and the tokens of a text, for constraints on the text of an
answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Texts that another text can follow. Some tokenizers begin every text with a space, but not the
# continuation of one. Rare characters come first, because no token joins them with what follows.
_PREFIXES = ("\x02", "\n", ":", "0", "x")
_CACHED_TEXTS = 4096


def read_vocabulary(folder: str | Path, size: int) -> Vocabulary | None:
    """Return the texts of `size` tokens; None where the tokenizer is missing or cannot tell."""
    try:
        tokenizer = Tokenizer.load(Path(folder))
    except TokenizerError as error:
        # clients do not see this: it has a path
        logger.warning("no constraints on answers: %s", error)
        return None
    return tokenizer_vocabulary(tokenizer, size)


def tokenizer_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary | None:
    """Return the texts of `size` tokens; None where a text depends on the token's neighbours."""
    spell = tokenizer.token_bytes
    if spell is None:
        return None
    texts = [spell(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
    marks = frozenset(token for token in tokenizer.special_ids if token < size)
    nothing = frozenset(token for token, text in enumerate(texts) if not text)
    special = marks | nothing
    encoder = ContinuationEncoder(tokenizer, texts, special)
    encode = lru_cache(_CACHED_TEXTS)(encoder.encode)
    return Vocabulary(texts, special, tokenizer.strips_space, encode)


class ContinuationEncoder:
    """Encodes texts that continue another text. The tokens spell exactly the text, and none of them
    is special.
    """

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[bytes], special: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._special = special
        # the texts of special tokens, which are ordinary text here
        words = {texts[token].decode(errors="replace") for token in special if texts[token]}
        self._special_words = sorted(words, key=len, reverse=True)
        self._first_letters = frozenset(word[0] for word in words)
        prefixes = list(_PREFIXES)
        if self._spells(self._encode_plain("x"), "x"):
            prefixes.insert(0, "")
        self._prefixes = [(prefix, self._encode_plain(prefix)) for prefix in prefixes]

    def encode(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text; None if the tokenizer changes the text."""
        parts = [text]
        if not self._first_letters.isdisjoint(text):
            parts = self._split_special_words(text)
        tokens: list[int] = []
        for part in parts:
            found = self._encode_part(part)
            if found is None:
                return None
            tokens += found
        return tuple(tokens)

    def _encode_part(self, text: str) -> list[int] | None:
        for prefix, prefix_tokens in self._prefixes:
            tokens = self._encode_plain(prefix + text)
            rest = tokens[len(prefix_tokens) :]
            if tokens[: len(prefix_tokens)] == prefix_tokens and self._spells(rest, text):
                return rest
        return None

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _spells(self, tokens: Sequence[int], text: str) -> bool:
        if not self._special.isdisjoint(tokens) or max(tokens, default=0) >= len(self._texts):
            return False
        return b"".join([self._texts[token] for token in tokens]) == text.encode()

    def _split_special_words(self, text: str) -> list[str]:
        """Cut a text within the words that the tokenizer would turn into special tokens."""
        cuts = {0, len(text)}
        for word in self._special_words:
            place = text.find(word)
            while place >= 0 and len(word) > 1:
                cuts.add(place + 1)
                place = text.find(word, place + 1)
        return [text[start:end] for start, end in pairwise(sorted(cuts))]
