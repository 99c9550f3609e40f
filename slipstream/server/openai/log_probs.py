"""Log-probabilities of tokens in the formats of the two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.messages import Scores
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.tensors import single
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.text.stream import Detokenizer
from slipstream.server.text.tokenizer import Tokenizer

LEAST = -9999.0  # log-probability of an impossible token, because JSON has no infinity

TopTokens = list[tuple[int, float]]
# A token, its log-probability, and the most likely tokens with theirs. The first token of a prompt
# has neither.
Scored = tuple[int, float | None, TopTokens | None]


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


def _finite(value: float | None) -> float | None:
    """Return a log-probability as the FP32 number that Triton's tensors hold, and finite."""
    return None if value is None else max(single(value), LEAST)


@dataclass(frozen=True)
class TokenFormat:
    """The written form of the tokens of an answer."""

    tokenizer: Tokenizer
    hidden: frozenset[int] = frozenset()  # tokens that are not part of the text
    as_ids: bool = False  # tokens are named token_id:NUMBER in place of their texts

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else spell(self.tokenizer, token)[0]


class ScoredTokens:
    """Collects the tokens of an answer's text with their log-probabilities.

    The tokens of a stop word that ended the text are left out. So with stop words a token is
    reported only once a part of its text is: until then, it may belong to a stop word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: bool,
        hidden: frozenset[int] | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`hidden`: tokens without text, by default the special ones.

        `end_ids`: tokens that end an answer and are reported.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if hidden is None else hidden
        self._end_ids = end_ids
        self._detokenizer = tokenizer.detokenizer() if stop_words else None
        self._written = 0  # characters of all tokens so far
        self._sent = 0  # characters of the answer so far
        self._waiting: list[tuple[int, Scored]] = []  # (earliest start in the text, token)

    def push(self, output: TextOutput | Completion) -> list[Scored]:
        """Return the tokens that can be reported after this output."""
        scored: list[Scored] = list(
            zip(output.tokens, output.log_probs or [], _tops(output), strict=True)
        )
        if self._detokenizer is None:
            return scored
        self._waiting += [(self._start(self._detokenizer, entry[0]), entry) for entry in scored]
        self._sent += len(output.text)
        # whether no stop word was cut off
        complete = output.finish_reason not in ("", "stop") or (
            bool(output.finish_reason and output.tokens) and output.tokens[-1] in self._end_ids
        )
        reported = [entry for start, entry in self._waiting if complete or start < self._sent]
        self._waiting = self._waiting[len(reported) :]
        return reported

    def _start(self, detokenizer: Detokenizer, token: int) -> int:
        """Return where the token's text starts, or earlier if bytes before it are still held."""
        before = self._written
        if token in self._hidden:
            return before
        self._written += len(detokenizer.push((token,)))
        text, raw = spell(self._tokenizer, token)
        known = self._tokenizer.token_bytes is not None and text.encode() == raw
        return max(before, self._written - len(text)) if known else before


def chat_log_probs(
    tokenizer: Tokenizer, scored: Sequence[Scored], as_ids: bool = False
) -> dict[str, Any]:
    """Return the log-probabilities of a chat message."""
    form = TokenFormat(tokenizer, as_ids=as_ids)
    spelled: dict[int, tuple[str, list[int]]] = {}
    content = []
    for token, value, top in scored:
        entry = _chat_entry(form, spelled, token, value)
        entry["top_logprobs"] = [_chat_entry(form, spelled, *pair) for pair in top or ()]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(
    form: TokenFormat, spelled: dict[int, tuple[str, list[int]]], token: int, value: float | None
) -> dict[str, Any]:
    """spelled: tokens that were named before, as the likeliest tokens repeat"""
    found = spelled.get(token)
    if found is None:
        found = (form.name(token), list(spell(form.tokenizer, token)[1]))
        spelled[token] = found
    return {"token": found[0], "logprob": _finite(value), "bytes": found[1]}


def _tops(output: TextOutput | Completion) -> Sequence[TopTokens]:
    """Return the most likely tokens at each token. The end token, which is left out, has some."""
    if not output.top_log_probs:
        return [[] for _ in output.tokens]
    return output.top_log_probs[: len(output.tokens)]


class _TextPosition:
    """The position in a text where its next token starts."""

    def __init__(self, form: TokenFormat) -> None:
        self.value = 0
        self._form = form
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # decides where the text of a token depends on its neighbours
        self._detokenizer = (
            form.tokenizer.detokenizer() if form.tokenizer.token_bytes is None else None
        )
        self._started = False

    def advance(self, token: int) -> None:
        if token in self._form.hidden:
            return
        if self._detokenizer is not None:
            self.value += len(self._detokenizer.push((token,)))
            return
        raw = spell(self._form.tokenizer, token)[1]
        if not self._started and self._form.tokenizer.strips_space and raw.startswith(b" "):
            raw = raw[1:]  # the tokenizer drops the first space of a text
        self._started = True
        self.value += len(self._decoder.decode(raw))

    def advance_in_prompt(self, token: int, text: str) -> None:
        """Pass a token of a prompt. A special token has a width only where the text has it."""
        if token not in self._form.tokenizer.special_ids:
            self.advance(token)
        else:
            shown = spell(self._form.tokenizer, token)[0]
            if shown and text.startswith(shown, self.value):
                self.value += len(shown)
                self._started = True
        self.value = min(self.value, len(text))

    def begin_answer(self, position: int) -> None:
        self.value = position
        self._started = True
        self._decoder.reset()


class CompletionLogProbs:
    """Writes the log-probabilities of a text completion, whole or piece by piece.

    `text_offset` is the position in the text where each token starts.
    """

    def __init__(self, form: TokenFormat, top: int) -> None:
        """`top`: number of the most likely tokens to report, too."""
        self._form = form
        self._top = top
        self._position = _TextPosition(form)

    def prompt_document(self, tokens: Sequence[int], text: str, scores: Scores) -> dict[str, Any]:
        """Return the log-probabilities of a prompt that the text begins with."""
        offsets = []
        for token in tokens:
            offsets.append(self._position.value)
            self._position.advance_in_prompt(token, text)
        self._position.begin_answer(len(text))
        return self._document(prompt_scores(tokens, scores, self._top), offsets)

    def document(self, scored: Sequence[Scored]) -> dict[str, Any]:
        offsets = []
        for token, _, _ in scored:
            offsets.append(self._position.value)
            self._position.advance(token)
        return self._document(scored, offsets)

    def _document(self, scored: Sequence[Scored], offsets: list[int]) -> dict[str, Any]:
        tops = [self._top_document(*entry) for entry in scored] if self._top else None
        return {
            "tokens": [self._form.name(token) for token, _, _ in scored],
            "token_logprobs": [_finite(value) for _, value, _ in scored],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top_document(
        self, token: int, value: float | None, top: TopTokens | None
    ) -> dict[str, float | None] | None:
        if top is None:
            return None
        likely = {self._form.name(other): _finite(score) for other, score in top}
        return likely | {self._form.name(token): _finite(value)}


def prompt_scores(tokens: Sequence[int], scores: Scores, top: int) -> list[Scored]:
    """Return the tokens of a prompt with their log-probabilities, and with the `top` most likely
    ones. The first token has none.
    """
    tops: Iterable[TopTokens] = scores.top_prompt_log_probs or [[] for _ in tokens[1:]]
    shown = [likely[:top] for likely in tops]
    scored = zip(tokens[1:], scores.prompt_log_probs, shown, strict=True)
    return [(tokens[0], None, None), *scored]


def prompt_log_probs(
    form: TokenFormat, tokens: Sequence[int], scores: Scores, top: int
) -> list[Any]:
    """Return the log-probabilities of a prompt in vLLM's format: for each token but the first, the
    token itself and the most likely ones, with their ranks.
    """
    ranks = [0, *scores.prompt_ranks]
    documents: list[Any] = []
    scored = prompt_scores(tokens, scores, top)
    for (token, value, likely), rank in zip(scored, ranks, strict=True):
        if value is None or likely is None:
            documents.append(None)
            continue
        entries = {str(token): _ranked(form, token, value, rank)}
        for place, (other, score) in enumerate(likely):
            entries.setdefault(str(other), _ranked(form, other, score, place + 1))
        documents.append(entries)
    return documents


def _ranked(form: TokenFormat, token: int, value: float, rank: int) -> dict[str, Any]:
    return {
        "logprob": _finite(value),
        "rank": rank,
        "decoded_token": spell(form.tokenizer, token)[0],
    }
