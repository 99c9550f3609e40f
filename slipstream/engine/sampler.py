"""Samples tokens from logits on a CPU, by the sampling parameters of each row. Needs no torch.

A token is a function of its row's logits, parameters, seed and position alone. So it is the same
whatever else is in the batch, and again after a preemption. `gpu/sampler.py` samples the same
tokens with torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.engine.plan import StepResult
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import NO_TOKEN_LEFT, SamplingParams
from slipstream.kernels import sampling

TopTokens = tuple[int, Any, Any]  # (sample, tokens [n], log-probabilities [n])


class Sampled(NamedTuple):
    """What a step sampled. The arrays are numpy's; on a GPU, torch's on the device."""

    tokens: Any  # int64 [samples]
    # [samples]: the largest logit of each row; not finite when no token is allowed
    best: Any
    log_probs: Any | None  # [samples]; nan for rows that do not ask for them
    top: list[TopTokens]
    # (sample, the model's own logits [vocab]) if they are requested
    raw: Sequence[tuple[int, Any]] = ()
    likeliest: Any | None = None  # the likeliest tokens of many samples: `gpu/sampler.Likeliest`


def sample(logits: np.ndarray, rows: list[int], lengths: list[int], state: Rows) -> Sampled:
    """Sample a token for each of `rows`. `lengths`: the number of tokens that each row knows.

    logits: float32 [samples, vocab], may be overwritten
    """
    tokens = np.array([line.argmax() for line in logits], dtype=np.int64)
    if all_plain(rows, state):
        return Sampled(tokens, logits[np.arange(len(tokens)), tokens], None, [])
    best = np.empty(len(rows), dtype=np.float32)
    log_probs = np.full(len(rows), np.nan, dtype=np.float32)
    top: list[TopTokens] = []
    raw: list[tuple[int, np.ndarray]] = []
    before: Counter[int] = Counter()  # row → samples before this one
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        p = state.sampling[row]
        values = logits[index]
        if p.generation_logits:
            raw.append((index, values.copy()))
        if p.beams:  # beams are scored by log-probabilities, which parameters then change
            values /= np.float32(p.temperature or 1.0)
            values -= sampling.log_sum_exp(values)
        # of the model's own logits, before any parameter changes them
        own = values.copy() if p.log_probs or p.top_log_probs else None
        _adjust(values, p, row, length, state)
        if row in state.masks:
            _apply_mask(values, state.masks[row], before[row])
        before[row] += 1
        tokens[index] = values.argmax()
        best[index] = values[tokens[index]]
        if not p.greedy and math.isfinite(best[index]):
            tokens[index] = _draw(values, p, row, length, state)
        if own is not None:
            mass = sampling.log_sum_exp(own)
            log_probs[index] = own[tokens[index]] - mass
            if p.top_log_probs and not p.beams:
                ids = sampling.largest(own, p.top_log_probs)
                top.append((index, ids, own[ids] - mass))
        if p.beams:
            ids = sampling.largest(values, p.candidates)
            top.append((index, ids, values[ids]))
    asked = any(state.sampling[row].log_probs or state.sampling[row].top_log_probs for row in rows)
    return Sampled(tokens, best, log_probs if asked else None, top, raw)


def all_plain(rows: list[int], state: Rows) -> bool:
    """Return whether sampling is an argmax for all of these rows."""
    return not state.masks and all(state.plain[row] for row in rows)


def to_result(sampled: Sampled) -> StepResult:
    """Return sampled tokens as lists. The arrays are on the host."""
    result = StepResult(tokens=sampled.tokens.tolist())
    if sampled.log_probs is not None:
        result.log_probs = sampled.log_probs.tolist()
    for index, tokens, log_probs in sampled.top:
        result.top_log_probs[index] = list(zip(tokens.tolist(), log_probs.tolist(), strict=True))
    for index, logits in sampled.raw:
        result.generation_logits[index] = logits.tobytes()
    for index, value in enumerate(sampled.best.tolist()):
        if not math.isfinite(value):
            result.errors[index] = (
                NO_TOKEN_LEFT
                if value == -math.inf
                else "the model produced logits that are not finite"
            )
    return result


def _adjust(logits: np.ndarray, p: SamplingParams, row: int, length: int, state: Rows) -> None:
    """Apply bias, allowed tokens, bans, minimum length and penalties to a row's logits [vocab]."""
    bias = state.bias[row]
    bad_words = state.bad_words[row]
    end_ids = state.end_ids[row]
    if bias is not None:
        np.add.at(logits, *bias)
    if (allowed := state.allowed[row]) is not None:
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
    if p.no_repeat_ngram:
        last, repeated = repeats(state.tokens[row, :length], p.no_repeat_ngram)
        logits[last[repeated]] = -np.inf
    if bad_words is not None:
        logits[bad_words.last[bad_words.banned(state.tokens[row], length)]] = -np.inf
    if end_ids is not None and length - state.prompt_tokens[row] < p.min_tokens:
        logits[end_ids] = -np.inf
    if p.penalised:
        _penalise(logits, p, state.tokens[row, :length], state.prompt_tokens[row])


def _penalise(logits: np.ndarray, p: SamplingParams, known: np.ndarray, prompt: int) -> None:
    """Apply the repetition, presence and frequency penalties to a row with these known tokens."""
    seen = np.unique(known)
    values = logits[seen]
    repetition = np.float32(p.repetition_penalty)
    logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    tokens, counts = np.unique(known[prompt:], return_counts=True)
    logits[tokens] -= np.float32(p.frequency_penalty) * counts.astype(np.float32)
    logits[tokens] -= np.float32(p.presence_penalty)


def repeats(tokens: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last token of each n-gram of `size` tokens in `tokens` [length], and which of the
    n-grams the next token could repeat. Both are [n].
    """
    if len(tokens) < size:
        return tokens[:0], np.zeros(0, dtype=bool)
    runs = np.lib.stride_tricks.sliding_window_view(tokens, size)  # [n, size]
    return runs[:, size - 1], (runs[:, : size - 1] == tokens[len(tokens) - size + 1 :]).all(axis=-1)


def _apply_mask(logits: np.ndarray, masks: bytes, place: int) -> None:
    """Set the logits of tokens that a row's mask excludes to -inf. A row with several samples has a
    mask for each of them; place: which one.
    """
    size = 4 * -(-len(logits) // 32)
    mask = np.frombuffer(masks, dtype=np.uint8, count=size, offset=place * size)
    excluded = np.unpackbits(~mask, count=len(logits), bitorder="little")
    np.putmask(logits, excluded.view(bool), -np.inf)


def _draw(logits: np.ndarray, p: SamplingParams, row: int, length: int, state: Rows) -> int:
    key = sampling.noise_key(p.seed, length)
    if not p.narrows:
        return sampling.draw_from_all(logits, p.temperature, p.min_p, key, p.typical_p)
    top_p = p.top_p
    if p.top_p_decay < 1.0:
        top_p = decayed_top_p(p, state.tokens[row, state.prompt_tokens[row] : length])
    return sampling.draw_narrowed(logits, p.temperature, p.top_k, top_p, p.min_p, key, p.typical_p)


def decayed_top_p(p: SamplingParams, output: np.ndarray) -> float:
    """Return top_p after these output tokens: it decays with each token since the last reset."""
    resets = np.flatnonzero(output == p.top_p_reset_id)
    steps = len(output) - (int(resets[-1]) + 1 if len(resets) else 0)
    if not steps:
        return p.top_p
    decayed = np.float32(p.top_p) * np.float32(p.top_p_decay) ** np.float32(steps)
    return max(float(decayed), p.top_p_min)
