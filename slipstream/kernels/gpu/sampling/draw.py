"""Draws a token for each row from its logits on the GPU, without a sort and without the host.

The sampling parameters of all rows lie in a table on the device. A draw takes the token with the
largest score: its scaled logit plus Gumbel noise, a hash of seed, position and token. The same
kernels run in every step, whatever the rows ask for: a greedy row costs an argmax.

    scan_parts    each part of a row: the best logit, the best score, the sum of the exponentials
    weigh_parts   rows with top-p or typical_p: whether the best score is of a token that is kept
    scan_again    rows where it is not, or with min-p: the best score of the tokens that may be
    _choose       each row: combine the parts, or draw from the top-k tokens; log-probabilities

The torch reference is `in_torch.py`, with `engine/gpu/sampler.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import (
    CachedKernel,
    overlapping,
    pieces,
    power_of_two,
    wait_and_trigger,
)
from slipstream.kernels.gpu.sampling.filters import draw_from_parts, scan_again, weigh_parts
from slipstream.kernels.gpu.sampling.noise import noise_key
from slipstream.kernels.gpu.sampling.parts import (
    PART_BEST,
    PART_RAW_SUM,
    PART_RAW_TOP,
    PART_TOKEN,
    read_part,
    scan_parts,
    sum_parts,
)
from slipstream.kernels.gpu.sampling.table import (
    ADJUSTS,
    BIAS_COUNT,
    DRAWS,
    FLAGS,
    FREQUENCY,
    GROUP,
    LOG_PROBS,
    MAX_TOP_COUNT,
    MAX_TOP_K,
    PART_FIELDS,
    PARTS,
    PRESENCE,
    PROMPT_TOKENS,
    REPETITION,
    TOP_COUNT,
    TOP_K,
    Drawn,
    SamplingTable,
    Scratch,
    read_field,
    read_real,
)
from slipstream.kernels.gpu.sampling.top_k import draw_from_kept, keep_top_k, list_groups

_BLOCK = 1024  # tokens that a CTA reads at a time
_CHUNK = 64  # groups that a CTA holds in registers
# A CTA takes about as long to begin and to end as to read 5,000 logits. Rows are cut into fewer
# parts where there are this many CTAs, but not into too few: some parts are read again.
_ENOUGH_CTAS = 2048
_MIN_PARTS = 8


@triton.jit
def _find_top_k(
    base, largest, groups, kept, group_count, top_k, vocab,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the tokens with the top-k logits of a row and the logits; return how many."""
    listed, low = list_groups(largest, groups, group_count, top_k, GROUPS, CHUNK)
    return keep_top_k(base, groups, kept, listed, low, top_k, vocab, GROUP, CHUNK, CAPACITY)


@triton.jit
def _raw_logit(
    value, token, tokens, table, row, length, bias_tokens, bias_values, BLOCK: tl.constexpr
):
    """Return the model's own logit of a token, from the logit that `adjust` has made of it."""
    seen = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    prompt = read_field(table, row, PROMPT_TOKENS)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        same = (at < length) & (tl.load(tokens + at, at < length, other=-1) == token)
        seen += same.to(tl.int32)
        count += (same & (at >= prompt)).to(tl.int32)
    uses = tl.sum(count, 0)
    presence = tl.where(uses > 0, read_real(table, row, PRESENCE), 0.0)
    value += presence + uses * read_real(table, row, FREQUENCY)
    repetition = tl.where(tl.sum(seen, 0) > 0, read_real(table, row, REPETITION), 1.0)
    value = tl.where(value > 0, value * repetition, value / repetition)
    bias_count = read_field(table, row, BIAS_COUNT)
    for begin in range(0, bias_count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        same = tl.load(bias_tokens + at, at < bias_count, other=-1) == token
        value -= tl.sum(
            tl.where(same, tl.load(bias_values + at, at < bias_count, other=0.0), 0.0), 0
        )
    return value


@CachedKernel
@triton.jit
def _choose(
    logits,
    rows,
    lengths,
    table,
    bias_tokens,
    bias_values,
    parts,
    largest,
    groups,
    kept,
    raw,
    tokens,
    tokens_out,
    best_out,
    log_probs_out,
    top_out,
    vocab,
    stride,
    group_count,
    span,
    tokens_stride,
    MAX_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOPS: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store the token of one row, its log-probability and the likeliest tokens."""
    wait_and_trigger(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    length = tl.load(lengths + sample)
    flags = read_field(table, row, FLAGS)
    own = parts + sample * PART_FIELDS * PARTS
    own_largest = largest + sample * group_count
    own_groups = groups + sample * group_count
    own_kept = kept + sample * 2 * CAPACITY
    base = logits + sample * stride
    part_count = tl.cdiv(vocab, span)
    bests = read_part(own, part_count, PART_BEST, float("-inf"), PARTS)
    broken = tl.sum((bests != bests).to(tl.int32), 0) > 0
    value, index = tl.max(bests, 0, return_indices=True)
    token = tl.load(own + PART_TOKEN * PARTS + index).to(tl.int32, bitcast=True)
    best = tl.where(broken, float("nan"), value)
    tl.store(best_out + sample, best)
    finite = (best > float("-inf")) & (best < float("inf"))  # else there is nothing to draw from
    if finite & (flags & DRAWS != 0):
        key = noise_key(table, row, length)
        top_k = read_field(table, row, TOP_K)
        if top_k > 0:
            count = _find_top_k(
                base, own_largest, own_groups, own_kept, group_count, top_k, vocab,
                GROUP, GROUPS, CHUNK, CAPACITY,
            )  # fmt: skip
            value, token = draw_from_kept(own_kept, count, table, row, key, CAPACITY, FAST)
            tl.debug_barrier()
        else:
            value, token = draw_from_parts(
                base, own, table, row, key, vocab, span, PARTS, BLOCK, FAST
            )
    tl.store(tokens_out + sample, token.to(tl.int64))
    log_prob = float("nan")
    if flags & LOG_PROBS != 0:
        if flags & ADJUSTS != 0:
            own_logit = _raw_logit(
                value, token, tokens + row * tokens_stride, table, row, length,
                bias_tokens + row * MAX_BIAS, bias_values + row * MAX_BIAS, BLOCK,
            )  # fmt: skip
            log_prob = own_logit - tl.load(raw + sample)
        else:
            top, total = sum_parts(own, part_count, PART_RAW_TOP, PART_RAW_SUM, PARTS)
            log_sum = top + tl.log(total)
            log_prob = value - log_sum
            wanted = read_field(table, row, TOP_COUNT)
            if finite & (wanted > 0):
                count = _find_top_k(
                    base, own_largest, own_groups, own_kept, group_count, wanted, vocab,
                    GROUP, GROUPS, CHUNK, CAPACITY,
                )  # fmt: skip
                place = tl.arange(0, TOPS)
                x = tl.load(own_kept + CAPACITY + place, place < count, other=0)
                x = x.to(tl.float32, bitcast=True) - log_sum
                top_place = top_out + sample * 2 * TOPS + place
                found = tl.load(own_kept + place, place < count, other=0)
                tl.store(top_place, found.to(tl.float32, bitcast=True))
                tl.store(top_place + TOPS, tl.where(place < count, x, float("-inf")))
    tl.store(log_probs_out + sample, log_prob)


def draw(
    logits: Tensor,  # float32 [samples, vocab]; masked tokens become -inf
    rows: Tensor,  # int32 [samples]
    lengths: Tensor,  # int32 [samples]: number of tokens that each row knows
    tokens: Tensor,  # int64 [rows of the engine, longest]
    table: SamplingTable,
    scratch: Scratch,  # of at least as many samples
    deterministic: bool = False,
) -> Drawn:
    """Draw a token for each row. deterministic: cut rows alike, however many there are"""
    samples, vocab = logits.shape
    span = _test_parts(logits, rows, lengths, table, scratch, deterministic)
    drawn = Drawn.empty(samples, logits.device)
    group_count = scratch.groups.shape[1]
    _choose[(samples,)](
        logits,
        rows,
        lengths,
        table.fields,
        table.bias_tokens,
        table.bias_values,
        scratch.parts,
        scratch.groups,
        scratch.lists,
        scratch.kept,
        scratch.raw,
        tokens,
        drawn.tokens,
        drawn.best,
        drawn.log_probs,
        drawn.top,
        vocab,
        logits.stride(0),
        group_count,
        span,
        tokens.stride(0),
        MAX_BIAS=table.bias_tokens.shape[1],
        PARTS=PARTS,
        PART_FIELDS=PART_FIELDS,
        BLOCK=_BLOCK,
        GROUP=GROUP,
        GROUPS=power_of_two(group_count),
        CHUNK=_CHUNK,
        CAPACITY=MAX_TOP_K,
        TOPS=MAX_TOP_COUNT,
        FAST=logits.is_cuda,
        num_warps=16,
        **overlapping(logits.device),
    )
    return drawn


def _span(samples: int, vocab: int) -> int:
    """Return the tokens of a part: few for few rows, so that all SMs have work."""
    parts = PARTS
    while parts > _MIN_PARTS and samples * parts > _ENOUGH_CTAS:
        parts //= 2
    return pieces(vocab, parts * GROUP) * GROUP


def _test_parts(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    table: SamplingTable,
    scratch: Scratch,
    deterministic: bool,
) -> int:
    """Store the best of each part of each row, after the filters of rows without top-k. Return the
    tokens of a part.
    """
    samples, vocab = logits.shape
    span = _span(1 if deterministic else samples, vocab)
    shared = {
        "PARTS": PARTS,
        "PART_FIELDS": PART_FIELDS,
        "BLOCK": _BLOCK,
        "num_warps": 4,
        **overlapping(logits.device),
    }
    fast = logits.is_cuda
    sizes = (vocab, logits.stride(0))
    grid = (samples, pieces(vocab, span))
    scan_parts[grid](
        logits,
        rows,
        lengths,
        table.fields,
        table.masks,
        table.hashes,
        scratch.parts,
        scratch.groups,
        *sizes,
        table.masks.shape[1],
        scratch.groups.shape[1],
        span,
        GROUP=GROUP,
        FAST=fast,
        **shared,
    )
    weigh_parts[grid](logits, rows, table.fields, scratch.parts, *sizes, span, **shared)
    scan_again[grid](
        logits, rows, lengths, table.fields, scratch.parts, *sizes, span, FAST=fast, **shared
    )
    return span
