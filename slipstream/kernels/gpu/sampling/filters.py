"""Top-p, min-p and locally typical sampling of rows without top-k: the best score among the tokens
that are kept.

Top-p keeps the likeliest tokens up to a probability: the tokens whose `measure`, the negative
logit, is below a threshold. The threshold is never computed. The best score of all tokens wins if
the tokens with a smaller measure have less probability than top_p. Otherwise it is not kept, and
neither is any token with a larger measure: the best score among the tokens with a smaller measure
is the next to be tested. On average 1 / top_p tokens are tested. Locally typical sampling is the
same with another measure, the distance from the entropy. Tokens of equal measure are all kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.launch import CachedKernel, wait_and_trigger
from slipstream.kernels.gpu.sampling.noise import gumbel, noise_key
from slipstream.kernels.gpu.sampling.parts import (
    PART_BEST,
    PART_MASS,
    PART_NEXT,
    PART_NEXT_TOKEN,
    PART_NEXT_VALUE,
    PART_SCORE,
    PART_SCORE_TOKEN,
    PART_SCORE_VALUE,
    PART_SUM,
    PART_TOP,
    entropy_of_parts,
    read_part,
    sum_parts,
    winner,
)
from slipstream.kernels.gpu.sampling.table import (
    DRAWS,
    FLAGS,
    LOG_MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    read_field,
    read_real,
)


@triton.jit
def measure_of(x, inverse, centre, typical):
    """Return what orders the tokens that a filter keeps: the smallest first.

    centre: the scaled logit of a token whose surprise is the entropy
    """
    return tl.where(typical, tl.abs(x * inverse - centre), -x)


@triton.jit
def read_filter(parts, count, table, row, PARTS: tl.constexpr):
    """Return what the filters of a row need: 1 / temperature, the probability to keep, whether it
    is that of typical sampling, the centre, the least scaled logit, the largest one, and the sum of
    exp(scaled - largest).
    """
    inverse = 1.0 / read_real(table, row, TEMPERATURE)
    typical_p = read_real(table, row, TYPICAL_P)
    top, total = sum_parts(parts, count, PART_TOP, PART_SUM, PARTS)
    centre = top + tl.log(total) - entropy_of_parts(parts, count, top, total, PARTS)
    probability = tl.minimum(read_real(table, row, TOP_P), typical_p)
    floor = top + read_real(table, row, LOG_MIN_P)
    return inverse, probability, typical_p < 1.0, centre, floor, top, total


@triton.jit
def _best_score(parts, count, PARTS: tl.constexpr):
    """Return the logit and the token of the best score of a row."""
    scores = read_part(parts, count, PART_SCORE, float("-inf"), PARTS)
    values = read_part(parts, count, PART_SCORE_VALUE, float("-inf"), PARTS)
    tokens = read_part(parts, count, PART_SCORE_TOKEN, 0.0, PARTS).to(tl.int32, bitcast=True)
    _, value, token = winner(scores, values, tokens)
    return value, token


@triton.jit
def _tested_mass(parts, count, PARTS: tl.constexpr):
    """Return the mass of the tokens with a smaller measure than the best score of a row."""
    return tl.sum(read_part(parts, count, PART_MASS, 0.0, PARTS), 0)


@triton.jit
def _is_rejected(mass, probability, total):
    """Return whether tokens of this mass leave no room for another one."""
    return (probability < 1.0) & (mass >= probability * total) & (mass > 0)


@triton.jit
def _mass_below(base, begin, end, limit, inverse, centre, typical, top, BLOCK: tl.constexpr):
    """Return the sum of exp(scaled - top) of the tokens from `begin` to `end` with a measure below
    `limit`.
    """
    mass = tl.zeros((BLOCK,), tl.float32)
    first = begin + tl.arange(0, BLOCK)
    following = tl.load(base + first, first < end, other=float("-inf")).to(tl.float32)
    for start in range(begin, end, BLOCK):
        x = following
        ahead = start + BLOCK + tl.arange(0, BLOCK)
        following = tl.load(base + ahead, ahead < end, other=float("-inf")).to(tl.float32)
        smaller = measure_of(x, inverse, centre, typical) < limit
        mass += tl.where(smaller, tl.exp(x * inverse - top), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _best_below(
    base, begin, end, limit, floor, inverse, centre, typical, key,
    BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the best score, its logit and its token among the tokens from `begin` to `end` with a
    measure below `limit` and a scaled logit of at least `floor`.
    """
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    value = score
    token = tl.full((BLOCK,), 0, tl.int32) + begin
    first = begin + tl.arange(0, BLOCK)
    following = tl.load(base + first, first < end, other=float("-inf")).to(tl.float32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = following
        ahead = at + BLOCK
        following = tl.load(base + ahead, ahead < end, other=float("-inf")).to(tl.float32)
        scaled = x * inverse
        kept = (measure_of(x, inverse, centre, typical) < limit) & (scaled >= floor)
        found = tl.where(kept, scaled + gumbel(at, key, FAST), float("-inf"))
        value = tl.where(found > score, x, value)
        token = tl.where(found > score, at, token)
        score = tl.maximum(found, score)
    return winner(score, value, token)


@CachedKernel
@triton.jit
def weigh_parts(
    logits,
    rows,
    table,
    parts,
    vocab,
    stride,
    span,
    PARTS: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store the mass of the tokens in one part of a row whose measure is smaller than that of the
    best score. Rows without top-p and typical_p, and rows with top-k, have nothing to do.
    """
    wait_and_trigger(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    filters = tl.minimum(read_real(table, row, TOP_P), read_real(table, row, TYPICAL_P)) < 1.0
    draws = read_field(table, row, FLAGS) & DRAWS != 0
    if draws & filters & (read_field(table, row, TOP_K) == 0):
        own = parts + sample * PART_FIELDS * PARTS
        count = tl.cdiv(vocab, span)
        inverse, _, typical, centre, _, top, _ = read_filter(own, count, table, row, PARTS)
        value, _ = _best_score(own, count, PARTS)
        limit = measure_of(value, inverse, centre, typical)
        end = tl.minimum((part + 1) * span, vocab)
        base = logits + sample * stride
        mass = 0.0
        # Where no logit is larger, there is nothing to sum.
        if typical | (tl.load(own + PART_BEST * PARTS + part) > value):
            mass = _mass_below(base, part * span, end, limit, inverse, centre, typical, top, BLOCK)
        tl.store(own + PART_MASS * PARTS + part, mass)


@CachedKernel
@triton.jit
def scan_again(
    logits,
    rows,
    lengths,
    table,
    parts,
    vocab,
    stride,
    span,
    PARTS: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store the best score of one part of a row among the tokens that may be kept. The part is read
    again only if its best score is of a token that is not.
    """
    wait_and_trigger(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    probability = tl.minimum(read_real(table, row, TOP_P), read_real(table, row, TYPICAL_P))
    filters = (probability < 1.0) | (read_real(table, row, LOG_MIN_P) > float("-inf"))
    draws = read_field(table, row, FLAGS) & DRAWS != 0
    if draws & filters & (read_field(table, row, TOP_K) == 0):
        own = parts + sample * PART_FIELDS * PARTS
        count = tl.cdiv(vocab, span)
        inverse, probability, typical, centre, floor, _, total = read_filter(
            own, count, table, row, PARTS
        )
        value, _ = _best_score(own, count, PARTS)
        limit = float("inf")
        if _is_rejected(_tested_mass(own, count, PARTS), probability, total):
            limit = measure_of(value, inverse, centre, typical)
        place = own + part
        score = tl.load(place + PART_SCORE * PARTS)
        value = tl.load(place + PART_SCORE_VALUE * PARTS)
        token = tl.load(place + PART_SCORE_TOKEN * PARTS).to(tl.int32, bitcast=True)
        fits = (measure_of(value, inverse, centre, typical) < limit) & (value * inverse >= floor)
        if (score > float("-inf")) & (fits == 0):
            # The likeliest token of the part fits, or none does. Typical tokens may be elsewhere.
            best = tl.load(place + PART_BEST * PARTS)
            score = float("-inf")
            if typical | ((-best < limit) & (best * inverse >= floor)):
                end = tl.minimum((part + 1) * span, vocab)
                key = noise_key(table, row, tl.load(lengths + sample))
                score, value, token = _best_below(
                    logits + sample * stride, part * span, end, limit, floor,
                    inverse, centre, typical, key, BLOCK, FAST,
                )  # fmt: skip
        tl.store(place + PART_NEXT * PARTS, score)
        tl.store(place + PART_NEXT_VALUE * PARTS, value)
        tl.store(place + PART_NEXT_TOKEN * PARTS, token.to(tl.float32, bitcast=True))


@triton.jit
def draw_from_parts(
    base, parts, table, row, key, vocab, span,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the logit and the token that a row without top-k draws.

    The kernels before have tested the best score, and found the next one if it was rejected. A
    third one is rare: one CTA then looks for it.
    """
    infinity = float("inf")
    count = tl.cdiv(vocab, span)
    value, token = _best_score(parts, count, PARTS)
    probability = tl.minimum(read_real(table, row, TOP_P), read_real(table, row, TYPICAL_P))
    if (probability < 1.0) | (read_real(table, row, LOG_MIN_P) > -infinity):
        inverse, probability, typical, centre, floor, top, total = read_filter(
            parts, count, table, row, PARTS
        )
        mass = _tested_mass(parts, count, PARTS)
        rejected = _is_rejected(mass, probability, total)
        index = tl.arange(0, PARTS)
        scores = read_part(parts, count, PART_NEXT, -infinity, PARTS)
        values = read_part(parts, count, PART_NEXT_VALUE, -infinity, PARTS)
        tokens = read_part(parts, count, PART_NEXT_TOKEN, 0.0, PARTS).to(tl.int32, bitcast=True)
        _, next_value, next_token = winner(scores, values, tokens)
        tested = (rejected == 0) & (next_token == token)
        value = next_value
        token = next_token
        searching = (probability < 1.0) & (tested == 0)
        while searching:
            limit = measure_of(value, inverse, centre, typical)
            mass = _mass_below(base, 0, vocab, limit, inverse, centre, typical, top, 16 * BLOCK)
            searching = _is_rejected(mass, probability, total)
            if searching:
                unfit = measure_of(values, inverse, centre, typical) >= limit
                unfit = unfit & (scores > -infinity)
                while tl.sum(unfit.to(tl.int32), 0) > 0:
                    part = tl.min(tl.where(unfit, index, PARTS), 0)
                    end = tl.minimum((part + 1) * span, vocab)
                    found, found_value, found_token = _best_below(
                        base, part * span, end, limit, floor,
                        inverse, centre, typical, key, 4 * BLOCK, FAST,
                    )  # fmt: skip
                    scores = tl.where(index == part, found, scores)
                    values = tl.where(index == part, found_value, values)
                    tokens = tl.where(index == part, found_token, tokens)
                    unfit = unfit & (index != part)
                _, value, token = winner(scores, values, tokens)
    return value, token
