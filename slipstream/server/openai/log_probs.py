"""Log-probabilities of tokens in the forms of the two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from slipstream.server.generation_outputs import Progress
from slipstream.server.tensors import single
from slipstream.server.text.pipeline import TextDelta
from slipstream.server.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for a token that cannot come: JSON has no infinity


def spelled(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """What a token writes. One that is a part of a character only is shown as its bytes, as OpenAI shows it."""
    if tokenizer.token_bytes is None or token in tokenizer.special_ids or token >= tokenizer.vocab_size:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return text, text.encode()
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _told(value: float) -> float:
    return max(single(value), LEAST)


def chat_log_probs(tokenizer: Tokenizer, news: TextDelta | Progress) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text, raw = spelled(tokenizer, token)
        return {"token": text, "logprob": _told(value), "bytes": list(raw)}

    content = [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in top]}
        for token, value, top in zip(news.tokens, news.log_probs or [], _tops(news), strict=True)
    ]
    return {"content": content, "refusal": None}


def _tops(news: TextDelta | Progress) -> Sequence[list[tuple[int, float]]]:
    """One list a token, empty where none were asked for; the end mark's, which is no token here, left out."""
    return news.top_log_probs[: len(news.tokens)] if news.top_log_probs else [[] for _ in news.tokens]


class CompletionLogProbs:
    """Of one answer, bit by bit: `text_offset` says where in its text each token begins."""

    def __init__(self, tokenizer: Tokenizer, top: bool) -> None:
        """top: the likeliest tokens are told, too."""
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._begun = False

    def document(self, news: TextDelta | Progress) -> dict[str, Any]:
        texts, offsets, tops = [], [], []
        for token, value, top in zip(news.tokens, news.log_probs or [], _tops(news), strict=True):
            text, raw = spelled(self._tokenizer, token)
            texts.append(text)
            offsets.append(self._offset)
            tops.append({spelled(self._tokenizer, other)[0]: _told(told) for other, told in top} | {text: _told(value)})
            self._advance(raw)
        values = [_told(value) for value in news.log_probs or []]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops if self._top else None,
                "text_offset": offsets}

    def _advance(self, raw: bytes) -> None:
        if not self._begun and self._tokenizer.strips_space and raw.startswith(b" "):
            raw = raw[1:]  # a text's first space is not written
        self._begun = True
        self._offset += len(self._decoder.decode(raw))
