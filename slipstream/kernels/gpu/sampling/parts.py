"""The first pass over the logits: each row is cut into parts, and a CTA stores what is best in one
part. Later kernels combine the parts of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.launch import CachedKernel, wait_and_trigger
from slipstream.kernels.gpu.sampling.noise import exp, gumbel_of_hashes, noise_key
from slipstream.kernels.gpu.sampling.table import (
    ADJUSTS,
    DRAWS,
    FLAGS,
    LOG_MIN_P,
    LOG_PROBS,
    MASKED,
    TEMPERATURE,
    TOP_COUNT,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    read_field,
    read_real,
)

# What a CTA stores for its part of a row.
PART_BEST = tl.constexpr(0)  # the largest logit, nan if there is one
PART_TOKEN = tl.constexpr(1)  # its token
PART_TOP = tl.constexpr(2)  # the largest scaled logit
PART_SUM = tl.constexpr(3)  # of exp(scaled - PART_TOP)
PART_MOMENT = tl.constexpr(4)  # of exp(scaled - PART_TOP) * (scaled - PART_TOP)
PART_SCORE = tl.constexpr(5)  # the best score
PART_SCORE_VALUE = tl.constexpr(6)  # the logit of its token
PART_SCORE_TOKEN = tl.constexpr(7)
PART_RAW_TOP = tl.constexpr(8)  # the largest logit before the mask
PART_RAW_SUM = tl.constexpr(9)  # of exp(logit - PART_RAW_TOP)
# as PART_SUM, of the tokens with a smaller measure than the best score of the row
PART_MASS = tl.constexpr(10)
# the best score among the tokens that may be kept when the best score of the row is not
PART_NEXT = tl.constexpr(11)
PART_NEXT_VALUE = tl.constexpr(12)
PART_NEXT_TOKEN = tl.constexpr(13)

# The largest logit of a lane that has seen none but -inf. It is finite: the difference of two of
# them is 0.
NO_TOP = tl.constexpr(-3.0e38)


@triton.jit
def read_part(parts, count, FIELD: tl.constexpr, other, PARTS: tl.constexpr):
    """Return a field of all parts of a row: [PARTS], with `other` behind the last part.

    parts: the beginning of the row's parts; count: the number of parts
    """
    index = tl.arange(0, PARTS)
    return tl.load(parts + FIELD * PARTS + index, index < count, other=other)


@triton.jit
def sum_parts(parts, count, TOP: tl.constexpr, SUM: tl.constexpr, PARTS: tl.constexpr):
    """Return the largest value of a row, and the sum of exp(value - largest)."""
    tops = read_part(parts, count, TOP, float("-inf"), PARTS)
    top = tl.max(tops, 0)
    weights = tl.where(tops > float("-inf"), tl.exp(tops - top), 0.0)
    return top, tl.sum(weights * read_part(parts, count, SUM, 0.0, PARTS), 0)


@triton.jit
def entropy_of_parts(parts, count, top, total, PARTS: tl.constexpr):
    """Return the entropy of a row's distribution."""
    tops = read_part(parts, count, PART_TOP, float("-inf"), PARTS)
    some = tops > float("-inf")
    weights = tl.where(some, tl.exp(tops - top), 0.0)
    shift = tl.where(some, tops - top, 0.0)
    sums = read_part(parts, count, PART_SUM, 0.0, PARTS)
    moments = read_part(parts, count, PART_MOMENT, 0.0, PARTS) + shift * sums
    return tl.log(total) - tl.sum(weights * moments, 0) / total


@triton.jit
def add_weight(scaled, top, total, FAST: tl.constexpr):
    """Add scaled logits to running sums of exp(scaled - top), lane by lane, with one exponential
    each. `top` begins with NO_TOP, which is finite.
    """
    rise = scaled - top
    weight = exp(-tl.abs(rise), FAST)
    total = tl.where(rise > 0, total * weight + 1.0, total + weight)
    return tl.maximum(top, scaled), total


@triton.jit
def add_moment(scaled, top, total, moment):
    """Add scaled logits to running sums of exp(scaled - top) * (scaled - top), lane by lane.

    top, total: the sums of `add_weight` before these logits
    """
    rise = scaled - top
    weight = tl.exp(-tl.abs(rise))
    raised = (moment - rise * total) * weight
    # -inf adds nothing
    return tl.where(rise > 0, raised, moment + tl.where(weight > 0, weight * rise, 0.0))


@triton.jit
def combine_lanes(top, total, moment):
    """Return one top, sum and moment for all lanes."""
    largest = tl.max(top, 0)
    shift = top - largest
    weight = tl.exp(shift)
    moments = tl.sum(weight * (moment + shift * total), 0)
    return largest, tl.sum(weight * total, 0), moments


@triton.jit
def winner(scores, values, tokens):
    """Return the best score, its logit and its token, the first of equals."""
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, 0x7FFFFFFF), 0)
    value = tl.max(tl.where((scores == score) & (tokens == token), values, float("-inf")), 0)
    return score, value, token


@CachedKernel
@triton.jit
def scan_parts(
    logits,
    rows,
    lengths,
    table,
    masks,
    hashes,
    parts,
    groups,
    vocab,
    stride,
    words,
    group_count,
    span,
    PARTS: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Apply the row's mask, and store the best of one part of a row of logits.

    Each lane keeps what is best among the tokens it reads. The lanes are combined at the end.
    """
    wait_and_trigger(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + sample).to(tl.int64)
    flags = read_field(table, row, FLAGS)
    draws = flags & DRAWS != 0
    masked = flags & MASKED != 0
    # Adjusted logits are not the model's own: `adjust` has summed those.
    sums_raw = flags & (LOG_PROBS | ADJUSTS) == LOG_PROBS
    from_top_k = draws & (read_field(table, row, TOP_K) > 0)
    wants_groups = from_top_k | (read_field(table, row, TOP_COUNT) > 0)
    scores = draws & (from_top_k == 0)
    inverse = 1.0 / tl.where(draws, read_real(table, row, TEMPERATURE), 1.0)
    key = noise_key(table, row, tl.load(lengths + sample))
    typical = read_real(table, row, TYPICAL_P) < 1.0
    narrowed = read_real(table, row, TOP_P) < 1.0
    narrowed = narrowed | typical | (read_real(table, row, LOG_MIN_P) > float("-inf"))
    base = logits + sample * stride
    infinity = float("inf")
    lowest = tl.full((BLOCK,), -infinity, tl.float32)
    no_top = tl.full((BLOCK,), NO_TOP, tl.float32)
    zeros = tl.zeros((BLOCK,), tl.float32)
    best = lowest
    token = tl.full((BLOCK,), 0, tl.int32) + part * span
    top = no_top
    total = zeros
    moment = zeros
    score = lowest
    score_token = token
    raw_top = no_top
    raw_sum = zeros
    end = tl.minimum((part + 1) * span, vocab)
    first = part * span + tl.arange(0, BLOCK)
    following = tl.load(base + first, first < end, other=-infinity).to(tl.float32)
    for begin in range(part * span, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < end
        x = following
        # Read ahead, so that the reading and the arithmetic overlap.
        following = tl.load(base + at + BLOCK, at + BLOCK < end, other=-infinity).to(tl.float32)
        if sums_raw:
            raw_top, raw_sum = add_weight(x, raw_top, raw_sum, FAST)
        if masked:
            bits = tl.load(masks + row * words + at // 32, inside, other=0)
            allowed = (bits >> (at % 32)) & 1 != 0
            tl.store(base + at, -infinity, inside & ~allowed)
            # nan stays: the row's logits are broken
            x = tl.where(allowed | (x != x), x, -infinity)
        token = tl.where(x > best, at, token)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
        if wants_groups:
            largest = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
            group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(groups + sample * group_count + group, largest, group * GROUP < end)
        if scores:
            scaled = x * inverse
            if typical:
                moment = add_moment(scaled, top, total, moment)
            if narrowed:
                top, total = add_weight(scaled, top, total, FAST)
            hashed = tl.load(hashes + at, inside, other=0).to(tl.uint32, bitcast=True)
            found = scaled + gumbel_of_hashes(hashed, key, FAST)
            score_token = tl.where(found > score, at, score_token)
            score = tl.maximum(found, score)
    place = parts + sample * PART_FIELDS * PARTS + part
    largest, _, best_token = winner(best, best, token)
    broken = tl.sum((best != best).to(tl.int32), 0) > 0
    tl.store(place + PART_BEST * PARTS, tl.where(broken, float("nan"), largest))
    # A row of nan has no best token, but the next step may read one.
    best_token = tl.minimum(best_token, vocab - 1)
    tl.store(place + PART_TOKEN * PARTS, best_token.to(tl.float32, bitcast=True))
    if sums_raw:
        sum_top, sum_total, _ = combine_lanes(raw_top, raw_sum, zeros)
        tl.store(place + PART_RAW_TOP * PARTS, sum_top)
        tl.store(place + PART_RAW_SUM * PARTS, sum_total)
    if scores:
        sum_top, sum_total, sum_moment = combine_lanes(top, total, moment)
        tl.store(place + PART_TOP * PARTS, sum_top)
        tl.store(place + PART_SUM * PARTS, sum_total)
        tl.store(place + PART_MOMENT * PARTS, sum_moment)
        best_score, _, drawn = winner(score, score, score_token)
        drawn = tl.minimum(drawn, vocab - 1)
        tl.store(place + PART_SCORE * PARTS, best_score)
        # a token that was drawn is not masked, so its logit is still the one that was read
        tl.store(place + PART_SCORE_VALUE * PARTS, tl.load(base + drawn).to(tl.float32))
        tl.store(place + PART_SCORE_TOKEN * PARTS, drawn.to(tl.float32, bitcast=True))
