"""The longest token bounds the length of a prompt, where the tokenizer loses no characters."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from slipstream.server.text.longest_token import longest_token

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*tokens: str, pre_tokenizer=None, normalizer=None) -> tokenizers.Tokenizer:
    vocabulary = {text: index for index, text in enumerate([*LETTERS, *tokens])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def test_the_longest_token_of_a_byte_level_vocabulary():
    assert longest_token(byte_level("ab", "abcdefgh")) == 8
    tokenizer = byte_level("ab")
    tokenizer.add_special_tokens(["<|end|>"])
    assert longest_token(tokenizer) == 7


def test_lossless_splits_and_normal_forms_keep_the_bound():
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    assert longest_token(byte_level("abc", pre_tokenizer=digits)) == 3
    assert longest_token(byte_level("abc", normalizer=normalizers.NFC())) == 12


@pytest.mark.parametrize(
    "options",
    [
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        },
        {"normalizer": normalizers.Strip()},
    ],
)
def test_no_bound_where_characters_are_lost(options):
    assert longest_token(byte_level("abc", **options)) is None


def test_no_bound_where_a_token_takes_the_white_space_beside_it():
    tokenizer = byte_level("abc")
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert longest_token(tokenizer) is None


def test_no_bound_with_a_token_for_unknown_words():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert longest_token(words) is None
