"""Log-probabilities of tokens in the formats of the two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.tensors import single
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.text.stream import Detokenizer
from slipstream.server.text.tokenizer import Tokenizer

LEAST = -9999.0  # log-probability of an impossible token, because JSON has no infinity

# A token, its log-probability, and the most likely tokens with theirs.
Scored = tuple[int, float, list[tuple[int, float]]]


def spell(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return the text and bytes of a token. The text of a part of a character lists its bytes."""
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


def _finite(value: float) -> float:
    """Return a log-probability as the FP32 number that Triton's tensors hold, and finite."""
    return max(single(value), LEAST)


class ScoredTokens:
    """Collects the tokens of an answer's text with their log-probabilities.

    The tokens of a stop word that ended the text are left out. So with stop words a token is
    reported only once a part of its text is: until then, it may belong to a stop word.
    """

    def __init__(self, tokenizer: Tokenizer, stop_words: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer() if stop_words else None
        self._written = 0  # characters of all tokens so far
        self._sent = 0  # characters of the answer so far
        self._waiting: list[tuple[int, Scored]] = []  # (earliest start in the text, token)

    def push(self, output: TextOutput | Completion) -> list[Scored]:
        """Return the tokens that can be reported after this output."""
        scored = list(zip(output.tokens, output.log_probs or [], _tops(output), strict=True))
        if self._detokenizer is None:
            return scored
        self._waiting += [(self._start(self._detokenizer, entry[0]), entry) for entry in scored]
        self._sent += len(output.text)
        complete = output.finish_reason not in ("", "stop")  # no stop word was cut off
        reported = [entry for start, entry in self._waiting if complete or start < self._sent]
        self._waiting = self._waiting[len(reported) :]
        return reported

    def _start(self, detokenizer: Detokenizer, token: int) -> int:
        """Return where the token's text starts, or earlier if bytes before it are still held."""
        before = self._written
        if token in self._tokenizer.special_ids:
            return before
        self._written += len(detokenizer.push((token,)))
        text, raw = spell(self._tokenizer, token)
        known = self._tokenizer.token_bytes is not None and text.encode() == raw
        return max(before, self._written - len(text)) if known else before


def chat_log_probs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the log-probabilities of a chat message."""
    content = []
    for token, value, top in scored:
        entry = _chat_entry(tokenizer, token, value)
        entry["top_logprobs"] = [_chat_entry(tokenizer, *pair) for pair in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    text, raw = spell(tokenizer, token)
    return {"token": text, "logprob": _finite(value), "bytes": list(raw)}


def _tops(output: TextOutput | Completion) -> Sequence[list[tuple[int, float]]]:
    """Return the most likely tokens at each token. The end token, which is left out, has some."""
    if not output.top_log_probs:
        return [[] for _ in output.tokens]
    return output.top_log_probs[: len(output.tokens)]


class CompletionLogProbs:
    """Writes the log-probabilities of a text completion, whole or piece by piece.

    `text_offset` is the position in the text where each token starts.
    """

    def __init__(self, tokenizer: Tokenizer, top: bool) -> None:
        """`top`: report the most likely tokens, too."""
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._started = False

    def document(self, scored: Sequence[Scored]) -> dict[str, Any]:
        texts = []
        offsets = []
        tops = []
        for token, value, top in scored:
            text, raw = spell(self._tokenizer, token)
            texts.append(text)
            offsets.append(self._offset)
            likely = {spell(self._tokenizer, other)[0]: _finite(score) for other, score in top}
            tops.append(likely | {text: _finite(value)})
            self._advance(raw)
        values = [_finite(value) for _, value, _ in scored]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _advance(self, raw: bytes) -> None:
        if not self._started and self._tokenizer.strips_space and raw.startswith(b" "):
            raw = raw[1:]  # the tokenizer drops the first space of a text
        self._started = True
        self._offset += len(self._decoder.decode(raw))
