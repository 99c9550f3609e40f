"""The k likeliest tokens of a row, and a draw from them.

The k-th largest logit is found by bisection in the few groups of neighbouring tokens that can hold
it: those whose largest logit is among the k largest of all groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.sampling.filters import measure_of
from slipstream.kernels.gpu.sampling.noise import gumbel
from slipstream.kernels.gpu.sampling.parts import winner
from slipstream.kernels.gpu.sampling.table import (
    LOG_MIN_P,
    TEMPERATURE,
    TOP_P,
    TYPICAL_P,
    read_real,
)


@triton.jit
def _order_bits(x):
    """Return int32 numbers in the order of the reals x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """Return the number between two int32 numbers, which may be far apart."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _apart(low, high):
    return high.to(tl.int64) - low.to(tl.int64) > 1


@triton.jit
def _chunk(base, groups, first, count, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return the tokens and the logits of some listed groups: [CHUNK * GROUP] each."""
    place = first + tl.arange(0, CHUNK)
    group = tl.load(groups + place, place < count, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(base + at, (place < count)[:, None] & (at < vocab), other=float("-inf"))
    return tl.reshape(at, (CHUNK * GROUP,)), tl.reshape(x.to(tl.float32), (CHUNK * GROUP,))


@triton.jit
def list_groups(
    largest, groups, group_count, top_k, GROUPS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """List the groups that can hold one of the top-k logits; return how many there are, and the
    order bits of a bound that at least k logits reach.

    At least k groups reach the bound, so at least k logits do. A few groups more do no harm.
    """
    index = tl.arange(0, GROUPS)
    inside = index < group_count
    bits = _order_bits(tl.load(largest + index, inside, other=float("-inf")))
    # With more than one logit of each group, every group counts, and any bound holds.
    low = tl.min(tl.where(inside, bits, 0x7FFFFFFF), 0)
    low = tl.where(top_k <= group_count, low, -0x7FFFFFFF)
    high = tl.max(bits, 0) + 1
    count = group_count
    while (count > tl.maximum(top_k, CHUNK)) & _apart(low, high):
        middle = _middle(low, high)
        reached = tl.sum((bits >= middle).to(tl.int32), 0)
        if reached >= top_k:
            low = middle
            count = reached
        else:
            high = middle
    chosen = inside & (bits >= low)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + place, index, chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0), low


@triton.jit
def _count_from(base, groups, listed, bound, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many logits of the listed groups reach a bound."""
    count = 0
    for first in range(0, listed, CHUNK):
        _, x = _chunk(base, groups, first, listed, vocab, GROUP, CHUNK)
        count += tl.sum((_order_bits(x) >= bound).to(tl.int32), 0)
    return count


@triton.jit
def _threshold(
    base, groups, listed, low, top_k, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return a bound that the top-k logits of the listed groups reach, and no others but equals.

    low: a bound that at least k of them reach
    """
    high = tl.full((), 0x7FFFFFFF, tl.int32)
    count = top_k + 1
    if listed <= CHUNK:  # the usual case: the logits stay in registers
        _, x = _chunk(base, groups, 0, listed, vocab, GROUP, CHUNK)
        bits = _order_bits(x)
        high = tl.max(bits, 0) + 1
        while (count != top_k) & _apart(low, high):
            middle = _middle(low, high)
            reached = tl.sum((bits >= middle).to(tl.int32), 0)
            if reached >= top_k:
                low = middle
                count = reached
            else:
                high = middle
    else:
        while (count != top_k) & _apart(low, high):
            middle = _middle(low, high)
            reached = _count_from(base, groups, listed, middle, vocab, GROUP, CHUNK)
            if reached >= top_k:
                low = middle
                count = reached
            else:
                high = middle
    return low


@triton.jit
def keep_top_k(
    base, groups, kept, listed, low, top_k, vocab,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the tokens with the top-k logits, in their order, and the logits; return how many.

    Of equal logits at the end of the k, the first tokens are kept.
    """
    bound = _threshold(base, groups, listed, low, top_k, vocab, GROUP, CHUNK)
    room = top_k - _count_from(base, groups, listed, bound + 1, vocab, GROUP, CHUNK)
    stored = 0
    equals = 0
    for first in range(0, listed, CHUNK):
        at, x = _chunk(base, groups, first, listed, vocab, GROUP, CHUNK)
        bits = _order_bits(x)
        equal = (bits == bound).to(tl.int32)
        fits_equal = (equal != 0) & (equals + tl.cumsum(equal, 0) <= room)
        equals += tl.sum(equal, 0)
        keeps = ((bits > bound) | fits_equal) & (x > float("-inf"))
        place = stored + tl.cumsum(keeps.to(tl.int32), 0) - 1
        fits = keeps & (place < CAPACITY)
        tl.store(kept + place, at, fits)
        tl.store(kept + CAPACITY + place, x.to(tl.int32, bitcast=True), fits)
        stored += tl.sum(keeps.to(tl.int32), 0)
    tl.debug_barrier()
    return tl.minimum(stored, CAPACITY)


@triton.jit
def draw_from_kept(
    kept, count, table, row, key, CAPACITY: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Return the logit and the token that a row draws from the tokens that top-k kept."""
    infinity = float("inf")
    index = tl.arange(0, CAPACITY)
    inside = index < count
    at = tl.load(kept + index, inside, other=0)
    x = tl.load(kept + CAPACITY + index, inside, other=0).to(tl.float32, bitcast=True)
    x = tl.where(inside, x, -infinity)
    inverse = 1.0 / read_real(table, row, TEMPERATURE)
    typical_p = read_real(table, row, TYPICAL_P)
    typical = typical_p < 1.0
    probability = tl.minimum(read_real(table, row, TOP_P), typical_p)
    scaled = x * inverse
    top = tl.max(scaled, 0)
    fits = inside & (scaled >= top + read_real(table, row, LOG_MIN_P))
    # Typical sampling sees what min-p has kept, top-p does not.
    weighs = tl.where(typical, fits, inside)
    below = tl.where(weighs, scaled - top, 0.0)
    weight = tl.where(weighs, tl.exp(below), 0.0)
    total = tl.sum(weight, 0)
    centre = top + tl.sum(weight * below, 0) / total  # top + log(total) - entropy
    measures = measure_of(x, inverse, centre, typical)
    scores = tl.where(fits, scaled + gumbel(at, key, FAST), -infinity)
    value = -infinity
    token = 0
    searching = True
    while searching:
        _, value, token = winner(scores, x, at)
        measure = measure_of(value, inverse, centre, typical)
        mass = tl.sum(tl.where(measures < measure, weight, 0.0), 0)
        searching = (probability < 1.0) & (mass >= probability * total) & (mass > 0)
        scores = tl.where(measures < measure, scores, -infinity)
    return value, token
