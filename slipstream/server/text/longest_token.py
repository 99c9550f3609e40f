"""The most characters that one token of a tokenizer stands for.

A text with more characters per token of the context is too long, which is known without tokenizing
it.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Most characters of a token where the tokenizer does not tell.
LONGEST_TOKEN = 256
# Normal forms may join several characters to one. A pair or a triple is common, four are not.
_MAX_JOINED = {"NFC": 4}
# Bytes that a vocabulary must have. Many lack control characters and bytes that UTF-8 never has.
_MIN_BYTES = 224
_LOSSLESS_SPLITS = ("Split", "Digits", "Punctuation")


class TooManyTokens(ValueError):
    """A text has too many tokens."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has {count} tokens")
        self.count = count


def longest_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the most characters of a token; None where there is no such number.

    There is one where every byte of a text is part of a token: byte-level BPE. Other tokenizers
    have a token for unknown texts of any length, or remove characters.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not isinstance(tokenizer.model, models.BPE) or not _is_byte_level(tokenizer.pre_tokenizer):
        return None
    if len(vocabulary.keys() & set(pre_tokenizers.ByteLevel.alphabet())) < _MIN_BYTES:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they take white space
        return None
    joined = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        if step["type"] not in _MAX_JOINED:
            return None
        joined *= _MAX_JOINED[step["type"]]
    return max(map(len, vocabulary)) * joined


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Return whether a text is split without loss, and then spelled in bytes."""
    *splits, last = _steps(pre_tokenizer, "pretokenizers") or [{"type": ""}]
    lossless = all(
        step["type"] in _LOSSLESS_SPLITS and step.get("behavior") != "Removed" for step in splits
    )
    return last["type"] == "ByteLevel" and lossless


def _steps(component: Any, members: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, also where it is a sequence."""
    if component is None:
        return []
    return _flatten(json.loads(component.__getstate__()), members)


def _flatten(description: dict[str, Any], members: str) -> list[dict[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [step for member in description[members] for step in _flatten(member, members)]
