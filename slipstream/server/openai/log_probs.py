"""Log-probabilities of tokens in the forms of the two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.tensors import single
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.text.detokenizer import Detokenizer
from slipstream.server.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for a token that cannot come: JSON has no infinity

# a token, its log-probability, and those of the likeliest
Scored = tuple[int, float, list[tuple[int, float]]]


def spelled(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """What a token writes. One that is a part of a character only is shown as its bytes, as OpenAI
    shows it.
    """
    if (
        tokenizer.token_bytes is None
        or token in tokenizer.special_ids
        or token >= tokenizer.vocab_size
    ):
        text = tokenizer.decode([token], skip_special_tokens=False)
        return text, text.encode()
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _told(value: float) -> float:
    return max(single(value), LEAST)


class ScoredTokens:
    """Of one answer, bit by bit: the tokens that its text is made of, not those of the stop word
    that ended it.

    Where there are stop words, a token is told once some of its text is, as it may yet prove to be
    a stop word's.
    """

    def __init__(self, tokenizer: Tokenizer, stop_words: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer() if stop_words else None
        self._written = 0  # characters of all tokens
        self._answered = 0  # those that the answer has
        self._waiting: list[tuple[int, Scored]] = []  # where each begins, or before

    def push(self, news: TextOutput | Completion) -> list[Scored]:
        scored = list(zip(news.tokens, news.log_probs or [], _tops(news), strict=True))
        if self._detokenizer is None:
            return scored
        self._waiting += [(self._begin(self._detokenizer, entry[0]), entry) for entry in scored]
        self._answered += len(news.text)
        whole = news.finish_reason not in ("", "stop")  # nothing was cut off
        told = [entry for begin, entry in self._waiting if whole or begin < self._answered]
        self._waiting = self._waiting[len(told) :]
        return told

    def _begin(self, detokenizer: Detokenizer, token: int) -> int:
        """Never too late. Too early by as much as is still held of a run of bytes, which may make a
        character.
        """
        before = self._written
        if token in self._tokenizer.special_ids:
            return before
        self._written += len(detokenizer.push((token,)))
        text, raw = spelled(self._tokenizer, token)
        known = self._tokenizer.token_bytes is not None and text.encode() == raw
        return max(before, self._written - len(text)) if known else before


def chat_log_probs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text, raw = spelled(tokenizer, token)
        return {"token": text, "logprob": _told(value), "bytes": list(raw)}

    content = [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in top]}
        for token, value, top in scored
    ]
    return {"content": content, "refusal": None}


def _tops(news: TextOutput | Completion) -> Sequence[list[tuple[int, float]]]:
    """One list a token, empty where none were asked for; the end mark's, which is no token here,
    left out.
    """
    return (
        news.top_log_probs[: len(news.tokens)] if news.top_log_probs else [[] for _ in news.tokens]
    )


class CompletionLogProbs:
    """Of one answer, bit by bit: `text_offset` says where in its text each token begins."""

    def __init__(self, tokenizer: Tokenizer, top: bool) -> None:
        """top: the likeliest tokens are told, too."""
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._begun = False

    def document(self, scored: Sequence[Scored]) -> dict[str, Any]:
        texts, offsets, tops = [], [], []
        for token, value, top in scored:
            text, raw = spelled(self._tokenizer, token)
            texts.append(text)
            offsets.append(self._offset)
            tops.append(
                {spelled(self._tokenizer, other)[0]: _told(told) for other, told in top}
                | {text: _told(value)}
            )
            self._advance(raw)
        values = [_told(value) for _, value, _ in scored]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _advance(self, raw: bytes) -> None:
        if not self._begun and self._tokenizer.strips_space and raw.startswith(b" "):
            raw = raw[1:]  # a text's first space is not written
        self._begun = True
        self._offset += len(self._decoder.decode(raw))
