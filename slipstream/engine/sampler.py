"""Samples tokens from logits on a CPU, by the sampling parameters of each row. Needs no torch.

A token is a function of its row's logits, parameters, seed and position alone. So it is the same
whatever else is in the batch, and again after a preemption. `gpu/sampler.py` samples the same
tokens with torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.engine.plan import StepResult
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import NO_TOKEN_LEFT, SamplingParams
from slipstream.kernels import sampling

TopTokens = tuple[int, Any, Any]  # (sample, tokens [n], log-probabilities [n])


class Sampled(NamedTuple):
    """The samples of a step. The arrays are numpy's; on a GPU, torch's on the device."""

    tokens: Any  # int64 [samples]
    # [samples]: the largest logit of each row; not finite when no token is allowed
    best: Any
    log_probs: Any | None  # [samples]; nan for rows that do not ask for them
    top: list[TopTokens]
    # (sample, the model's own logits [vocab]) if they are requested
    raw: Sequence[tuple[int, Any]] = ()
    likeliest: Any | None = None  # the likeliest tokens of many samples: `gpu/sampler.Likeliest`


class Draw(NamedTuple):
    """A token to draw."""

    sample: int  # row of the logits
    parameters: SamplingParams
    top_p: float
    key: int  # of the noise


# (logits [samples, vocab], draws) → the tokens that each draw may take; None: not known
FindCandidates = Callable[[np.ndarray, Sequence[Draw]], Sequence[sampling.Candidates | None]]


def sample(
    logits: np.ndarray,
    rows: list[int],
    lengths: list[int],
    state: Rows,
    find_candidates: FindCandidates = lambda logits, draws: [None] * len(draws),
    likeliest: np.ndarray | None = None,
) -> Sampled:
    """Sample a token for each of `rows`. `lengths`: the number of tokens that each row knows.

    logits: float32 [samples, vocab], may be overwritten; find_candidates: a faster way to find them
    than to sort the vocabulary; likeliest: tokens with the largest logits [samples], if known
    """
    if likeliest is None:
        likeliest = np.array([line.argmax() for line in logits], dtype=np.int64)
    tokens = likeliest.copy()
    if all_plain(rows, state):
        return Sampled(tokens, logits[np.arange(len(tokens)), tokens], None, [])
    best = np.empty(len(rows), dtype=np.float32)
    top: list[TopTokens] = []
    raw: list[tuple[int, np.ndarray]] = []
    own: list[tuple[int, SamplingParams, np.ndarray]] = []  # logits before parameters change them
    draws: list[Draw] = []
    before: Counter[int] = Counter()  # row → samples before this one
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        p = state.sampling[row]
        values = logits[index]
        if p.generation_logits:
            raw.append((index, values.copy()))
        if p.beams:  # beams are scored by log-probabilities, which parameters then change
            values /= np.float32(p.temperature or 1.0)
            values -= sampling.log_sum_exp(values)
        if p.log_probs or p.top_log_probs:
            own.append((index, p, values.copy()))
        changed = _adjust(values, p, row, length, before[row], state)
        before[row] += 1
        if changed or p.beams:
            tokens[index] = values.argmax()
        best[index] = values[tokens[index]]
        if not p.greedy and math.isfinite(best[index]):
            draws.append(_describe_draw(index, p, row, length, state))
        if p.beams:
            ids = sampling.largest(values, p.candidates)
            top.append((index, ids, values[ids]))
    for draw, found in zip(draws, find_candidates(logits, draws) if draws else (), strict=True):
        tokens[draw.sample] = _draw(logits[draw.sample], draw, found)
    log_probs = _log_probs(tokens, own, top) if own else None
    return Sampled(tokens, best, log_probs, top, raw)


def _log_probs(
    tokens: np.ndarray, own: list[tuple[int, SamplingParams, np.ndarray]], top: list[TopTokens]
) -> np.ndarray:
    """Return the log-probability of each token, nan where it is not wanted. Append the likeliest
    tokens of each sample to `top`. own: (sample, parameters, logits)
    """
    found = np.full(len(tokens), np.nan, dtype=np.float32)
    for index, p, values in own:
        mass = sampling.log_sum_exp(values)
        found[index] = values[tokens[index]] - mass
        if p.top_log_probs and not p.beams:
            ids = sampling.largest(values, p.top_log_probs)
            top.append((index, ids, values[ids] - mass))
    return found


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


def _adjust(
    logits: np.ndarray, p: SamplingParams, row: int, length: int, before: int, state: Rows
) -> bool:
    """Apply bias, allowed tokens, bans, minimum length, penalties and the mask to a row's logits
    [vocab]. Return whether there are any. before: samples of the row before this one
    """
    bias = state.bias[row]
    bad_words = state.bad_words[row]
    end_ids = state.end_ids[row]
    allowed = state.allowed[row]
    given = (bias, bad_words, end_ids, allowed)
    has_mask = row in state.masks
    if not (p.no_repeat_ngram or p.penalised or has_mask) and all(one is None for one in given):
        return False
    if bias is not None:
        np.add.at(logits, *bias)
    if allowed is not None:
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
    if has_mask:
        _apply_mask(logits, state.masks[row], before)
    return True


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


def _describe_draw(sample: int, p: SamplingParams, row: int, length: int, state: Rows) -> Draw:
    top_p = p.top_p
    if p.top_p_decay < 1.0:
        top_p = decayed_top_p(p, state.tokens[row, state.prompt_tokens[row] : length])
    return Draw(sample, p, top_p, sampling.noise_key(p.seed, length))


def _draw(logits: np.ndarray, draw: Draw, candidates: sampling.Candidates | None) -> int:
    """Draw a token. logits: [vocab]"""
    p = draw.parameters
    if not p.narrows:
        if candidates is None:
            return sampling.draw_from_all(logits, p.temperature, p.min_p, draw.key, p.typical_p)
        return sampling.draw_one(candidates.tokens, candidates.scaled, p.min_p, draw.key)
    bounds = (p.top_k, draw.top_p, p.min_p, draw.key, p.typical_p)
    if candidates is None:
        return sampling.draw_narrowed(logits, p.temperature, *bounds)
    return sampling.draw_from_candidates(candidates, *bounds)


def decayed_top_p(p: SamplingParams, output: np.ndarray) -> float:
    """Return top_p after these output tokens: it decays with each token since the last reset."""
    resets = np.flatnonzero(output == p.top_p_reset_id)
    steps = len(output) - (int(resets[-1]) + 1 if len(resets) else 0)
    if not steps:
        return p.top_p
    decayed = np.float32(p.top_p) * np.float32(p.top_p_decay) ** np.float32(steps)
    return max(float(decayed), p.top_p_min)
