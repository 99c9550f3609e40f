"""Streamed pieces joined equal the decoded whole, for all tokenizers, chunk sizes and stop words."""

import functools
from pathlib import Path

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.stream import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    TextStream,
    WindowDetokenizer,
)
from slipstream.server.text.tokenizer import Tokenizer


@functools.cache
def load(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Return chunks of these sizes and one with the rest. A size of 0 gives an empty chunk."""
    chunks = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [*chunks, ids]


def run(stream: TextStream, chunks: list[list[int]]) -> list[str]:
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


def until_stop(text: str, stops: list[str]) -> str:
    found = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(found)] if found else text


chunk_sizes = st.lists(st.integers(0, 5), max_size=20)
kinds = pytest.mark.parametrize("kind", samples.ALL)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Return a strategy for token ids: those of texts, and random ones, as a model may generate."""
    tokenizer = load(kind)
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    return st.one_of(samples.texts.map(lambda text: tokenizer.encode(text, False)), anything)


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=chunk_sizes, skip=st.booleans())
def test_joined_pieces_are_the_whole_text(kind, data, sizes, skip):
    ids = data.draw(ids_of(kind))
    pieces = run(TextStream(load(kind), skip_special_tokens=skip), cut(ids, sizes))
    assert "".join(pieces) == load(kind).decode(ids, skip)


@pytest.mark.parametrize("kind", ["llama2_json", "sentencepiece_bpe", "byte_level"])
@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=chunk_sizes)
def test_invalid_bytes_are_replaced_as_in_the_whole_text(kind, data, sizes):
    """The tokens are runs of single bytes: valid, truncated, and mixed with text."""
    tokenizer = load(kind)
    spell = functools.partial(byte_ids, kind)
    part = st.one_of(
        st.binary(min_size=1, max_size=4).map(spell),
        st.text(alphabet="é日🎉", min_size=1, max_size=2).map(lambda text: spell(text.encode())),
        st.sampled_from(["a", " b", "\n"]).map(lambda text: tokenizer.encode(text, False)),
        st.just([next(iter(tokenizer.special_ids))]),
    )
    ids = [token for run_of_ids in data.draw(st.lists(part, max_size=10)) for token in run_of_ids]
    assert "".join(run(TextStream(tokenizer), cut(ids, sizes))) == tokenizer.decode(ids)


def byte_ids(kind: str, content: bytes) -> list[int]:
    """Return one token for each byte."""
    backend = load(kind)._backend
    if kind != "byte_level":
        return [backend.id_of(f"<0x{byte:02X}>") for byte in content]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [backend.id_of(bytes_to_unicode()[byte]) for byte in content]


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=chunk_sizes)
def test_text_ends_at_the_first_stop_word(kind, data, sizes):
    ids = data.draw(ids_of(kind))
    text = load(kind).decode(ids)
    inside = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: text[start : start + size])
    )
    stops = data.draw(st.lists(st.one_of(inside, st.text(max_size=4), st.just("")), max_size=4))
    stream = TextStream(load(kind), stops)
    pieces = run(stream, cut(ids, sizes))
    assert "".join(pieces) == until_stop(text, stops)
    assert stream.stopped == any(stop and stop in text for stop in stops)


@pytest.mark.parametrize("kind", samples.SERVED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_never_contain_the_beginning_of_a_stop_word(kind, data):
    text = data.draw(samples.texts.filter(lambda text: len(text) > 3))
    ids = load(kind).encode(text, False)
    whole = load(kind).decode(ids)
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[start : start + 3]
    if not stop:
        return
    stream = TextStream(load(kind), [stop])
    output = ""
    for token in ids:
        output += stream.push([token])
        # after each token, not only at the end
        assert whole[: whole.find(stop)].startswith(output)


@pytest.mark.parametrize("kind", ["byte_level", "llama2_json"])
def test_characters_are_emitted_whole_and_as_early_as_possible(kind):
    tokenizer = load(kind)
    ids = [*byte_ids(kind, "é🎉".encode()), *tokenizer.encode("\nx", False)[-1:]]
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    if kind == "byte_level":
        assert pieces == ["", "é", "", "", "", "🎉", "x"]
    else:  # a later byte of the same run could still make all of it invalid
        assert pieces == [""] * 6 + ["é🎉x"]


def test_invalid_run_of_byte_tokens_gives_one_replacement_character_per_byte():
    ids = byte_ids("llama2_json", "é".encode() + b"\xe6")
    stream = TextStream(load("llama2_json"))
    assert stream.push(ids) == ""
    assert stream.finish() == "\ufffd" * 3 == load("llama2_json").decode(ids)


def test_leading_space_is_removed_once_also_after_special_tokens():
    tokenizer = load("llama2_json")
    (the,) = tokenizer.encode("the", False)
    stream = TextStream(tokenizer)
    assert [stream.push([tokenizer.bos_id]), stream.push([the]), stream.push([the])] == [
        "",
        "the",
        " the",
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte_level", ByteLevelDetokenizer),
        ("gpt2_files", ByteLevelDetokenizer),
        ("llama2_json", ByteFallbackDetokenizer),
        ("sentencepiece_bpe", ByteFallbackDetokenizer),
        ("metaspace_unigram", WindowDetokenizer),
    ],
)
def test_each_tokenizer_kind_has_its_detokenizer(kind, expected):
    """The window detokenizer would be slower, and inexact for invalid bytes."""
    assert type(load(kind).detokenizer()) is expected


@pytest.mark.parametrize("kind", samples.ALL)
def test_decoding_work_per_token_is_constant(kind, monkeypatch):
    """Count the tokens that each decode reads."""
    tokenizer = load(kind)
    backend = tokenizer._backend
    decoded_counts: list[int] = []
    original = type(backend).decode
    monkeypatch.setattr(
        type(backend),
        "decode",
        lambda self, ids, skip_special_tokens: (
            decoded_counts.append(len(ids)) or original(self, ids, skip_special_tokens)
        ),
    )
    ids = tokenizer.encode("the dog ", False) * 300
    stream = TextStream(tokenizer, ["nowhere"])
    pieces = [stream.push([token]) for token in ids]
    pieces.append(stream.finish())
    assert max(decoded_counts, default=0) <= 8
    assert "".join(pieces) == original(backend, ids, True)


def test_tokens_used_ends_with_the_token_that_completes_the_stop_word():
    tokenizer = load("byte_level")
    ids = [token for letter in "xyzEND!!" for token in tokenizer.encode(letter, False)]
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(ids) == "xyz"
    assert (stream.stopped, stream.tokens_used) == (True, 6)
    assert stream.push(ids) == ""
    assert stream.finish() == ""


def test_tokens_used_of_a_stop_word_inside_a_longer_one_that_does_not_match():
    tokenizer = load("byte_level")
    ids = [token for letter in "abcx" for token in tokenizer.encode(letter, False)]
    stream = TextStream(tokenizer, ["abcd", "bc"])
    assert stream.push(ids[:3]) == ""
    assert not stream.stopped  # "abcd" would match earlier
    assert stream.push(ids[3:]) == "a"
    assert (stream.stopped, stream.tokens_used) == (True, 3)


def test_stop_word_inside_a_token_keeps_the_text_before_it(tmp_path: Path):
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models

    library = LibraryTokenizer(models.BPE({"oneSTOPtwo": 0, "x": 1}, []))
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    stream = TextStream(Tokenizer.load(tmp_path), ["STOP"])
    assert stream.push([1, 0, 1]) == "xone"
    assert (stream.stopped, stream.tokens_used) == (True, 2)


def test_empty_stop_words_are_ignored():
    tokenizer = load("byte_level")
    stream = TextStream(tokenizer, ["", ""])
    assert stream.push(tokenizer.encode("hello", False)) == "hello"
    assert not stream.stopped


def test_ids_out_of_range_are_refused_by_number():
    tokenizer = load("byte_level")
    with pytest.raises(TokenizerError, match=f"token id {tokenizer.vocab_size} "):
        TextStream(tokenizer).push([0, tokenizer.vocab_size])
