"""Log-probabilities are reported for exactly the tokens of the text, with real tokenizers."""

from __future__ import annotations

import functools

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.openai.log_probs import ScoredTokens
from slipstream.server.text.stream import TextStream
from slipstream.server.text.tokenizer import Tokenizer


@functools.cache
def load(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


def deltas(tokenizer: Tokenizer, ids: list[int], stop: str, size: int) -> list[TextOutput]:
    """Return the outputs of a generator for these tokens. The last one reaches the length limit."""
    stream, news = TextStream(tokenizer, [stop]), []
    for start in range(0, len(ids), size):
        before, chunk = stream.tokens_used, ids[start : start + size]
        text, last = stream.push(chunk), start + size >= len(ids)
        text += stream.finish() if last else ""
        tokens = chunk[: max(stream.tokens_used - before, 0)] if stream.stopped else chunk
        reason = "stop" if stream.stopped else "length" if last else ""
        news.append(TextOutput(tokens, [0.0] * len(tokens), finish_reason=reason, text=text))
        if stream.stopped:
            break
    return news


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe"])
@settings(max_examples=80, deadline=None)
@given(data=st.data(), size=st.integers(1, 4))
def test_scored_tokens_are_exactly_those_of_the_text(kind, data, size):
    tokenizer = load(kind)
    ids = tokenizer.encode(data.draw(samples.texts.filter(bool)), False)
    written = tokenizer.decode(ids) or "-"
    begin = data.draw(st.integers(0, len(written) - 1))
    stop = written[begin : begin + data.draw(st.integers(1, 6))] + data.draw(
        st.sampled_from(["", "", "never"])
    )
    news = deltas(tokenizer, ids, stop, size)
    text, tokens = (
        "".join(delta.text for delta in news),
        [token for delta in news for token in delta.tokens],
    )
    reason = news[-1].finish_reason if news else ""
    whole = ScoredTokens(tokenizer, True).push(
        TextOutput(tokens, [0.0] * len(tokens), finish_reason=reason, text=text)
    )
    streamed = ScoredTokens(tokenizer, True)
    assert [entry for delta in news for entry in streamed.push(delta)] == whole
    reported = [token for token, _, _ in whole]
    assert reported == tokens[: len(reported)]
    if reason == "length":
        assert reported == ids
    elif "\ufffd" not in written:  # U+FFFD may also be a part of a character
        assert tokenizer.decode(reported).startswith(text)
        # a byte of a character is reported with the bytes before it
        held = not reported or not tokenizer.detokenizer().push(reported[-1:])
        assert held or not tokenizer.decode(reported[:-1]).startswith(text)
