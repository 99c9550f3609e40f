"""Stop words end a text and bad words never appear, for random tokens of all served tokenizers."""

from __future__ import annotations

import asyncio
import functools
import random

import numpy as np
import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_text import ScriptedEngine, collect

from slipstream.engine.constraints.bad_words import BadTexts, Spelling
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.text.vocabulary import tokenizer_vocabulary

KINDS = sorted(samples.SERVED)


@functools.cache
def load(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.SERVED[kind]())


def piece_of(chance: random.Random, text: str) -> str:
    """Return a random substring, sometimes with a letter appended that makes it absent."""
    start = chance.randrange(len(text))
    piece = text[start : start + chance.randrange(1, 6)]
    return piece + chance.choice(["", "", "", "q"])


def cut_at(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), chunk=st.sampled_from([1, 2, 5, 1000]))
def test_random_tokens_are_cut_at_random_stop_words(kind, seed, chunk):
    chance = random.Random(seed)
    tokenizer = load(kind)
    ordinary = [
        token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids
    ]
    ids = [chance.choice(ordinary) for _ in range(chance.randrange(1, 50))]
    if chance.random() < 0.5:
        ids = tokenizer.encode(chance.choice(samples.CORPUS), False)[:60]
    whole = tokenizer.decode(ids)
    if not whole:
        return
    stops = [piece_of(chance, whole) for _ in range(chance.randrange(1, 4))]
    deltas = [RequestOutput(tokens=ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    engine = ScriptedEngine([*deltas, RequestOutput(finish_reason="length")])
    outputs = asyncio.run(collect(engine, TextRequest("x", stop_words=stops), kind))
    assert "".join(delta.text for delta in outputs) == cut_at(whole, stops)
    assert outputs[-1].finish_reason == (
        "stop" if any(stop in whole for stop in stops) else "length"
    )


def allowed(mask: bytes, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:count].nonzero()[0]


@functools.cache
def spelling(kind: str) -> Spelling:
    vocabulary = tokenizer_vocabulary(load(kind), load(kind).vocab_size)
    assert vocabulary is not None
    return Spelling(vocabulary)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bad_words_never_appear_in_random_samples(kind, seed):
    chance = random.Random(seed)
    tokenizer = load(kind)
    words = chance.sample(
        ["th", "e", "日本", "é", "ab", "aba", " ", "<", "dog", "the d", "o w", "👩‍👧"], 4
    )
    bad = BadTexts(spelling(kind), [word.encode() for word in words])
    letters = [
        token for word in words for letter in word for token in tokenizer.encode(letter, False)
    ]
    tokens: list[int] = []
    for _ in range(80):  # mostly letters of the words, so that words are often nearly complete
        choices = allowed(bad.mask(tokens), tokenizer.vocab_size)
        likely = [token for token in letters if token in choices]
        tokens.append(
            chance.choice(likely)
            if likely and chance.random() < 0.8
            else int(chance.choice(choices))
        )
    text = tokenizer.decode(tokens)
    assert not [word for word in words if word in text]


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokens_that_complete_a_bad_word_are_forbidden(kind):
    tokenizer = load(kind)
    table = spelling(kind)
    word = "the"
    bad = BadTexts(table, [word.encode()])
    for before in ("", "x", "t", "th", "tht", "a th"):
        tokens = (
            [token for letter in before for token in tokenizer.encode("x" + letter, False)[1:]]
            if before
            else []
        )
        text = b"".join(table.texts[token] for token in tokens)
        free = set(allowed(bad.mask(tokens), tokenizer.vocab_size).tolist())
        for token in range(tokenizer.vocab_size):
            completes = word.encode() in text + table.texts[token]
            assert (token in free) != completes, (before, token)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_word_that_is_a_special_token_becomes_an_end_id(kind):
    """Special tokens are not in the text, so the engine must end at the token."""
    tokenizer = load(kind)
    marks = [(token, tokenizer.decode([token], False)) for token in sorted(tokenizer.special_ids)]
    marks = [(token, word) for token, word in marks if tokenizer.encode(word, False) == [token]]
    assert marks
    for token, word in marks:
        engine = ScriptedEngine([RequestOutput(finish_reason="length")])
        asyncio.run(
            collect(engine, TextRequest("the dog", stop_words=["dog", word], ignore_end=True), kind)
        )
        assert engine.sampling.end_ids == (token,)
        shown = TextRequest(
            "the dog", stop_words=[word], ignore_end=True, skip_special_tokens=False
        )
        asyncio.run(collect(engine, shown, kind))
        assert engine.sampling.end_ids == ()


def test_tokenizers_with_context_dependent_texts_forbid_token_sequences():
    tokenizer = Tokenizer.load(samples.word_piece())
    assert tokenizer_vocabulary(tokenizer, tokenizer.vocab_size) is None
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    asyncio.run(collect(engine, TextRequest("the dog", bad_words=["dog"]), "word_piece"))
    assert engine.sampling.bad_texts == ()
    assert engine.sampling.bad_words
