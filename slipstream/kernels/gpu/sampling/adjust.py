"""Changes the logits of a few tokens before a row samples: bias, penalties and bans, on the GPU.

The torch reference is `engine/gpu/sampler.py`. Rows without such parameters have nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, overlapping, wait_and_trigger
from slipstream.kernels.gpu.sampling.table import (
    ADJUSTS,
    BIAS_COUNT,
    END_COUNT,
    FLAGS,
    FREQUENCY,
    LOG_PROBS,
    MIN_TOKENS,
    NGRAM,
    PRESENCE,
    PROMPT_TOKENS,
    REPETITION,
    SamplingTable,
    Scratch,
    read_field,
    read_real,
)

_BLOCK = 1024


@triton.jit
def _sum_logits(base, vocab, BLOCK: tl.constexpr):
    """Return the logsumexp of a row."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(base + at, at < vocab, other=float("-inf")).to(tl.float32)
        raised = tl.maximum(top, x)
        finite = tl.where(raised > float("-inf"), raised, 0.0)
        total = total * tl.exp(top - finite) + tl.exp(x - finite)
        top = raised
    largest = tl.max(top, 0)
    return largest + tl.log(tl.sum(total * tl.exp(top - largest), 0))


@triton.jit
def _add_bias(base, tokens, values, count, BLOCK: tl.constexpr):
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = base + tl.load(tokens + at, at < count, other=0)
        x = tl.load(place, at < count, other=0.0)
        tl.store(place, x + tl.load(values + at, at < count, other=0.0), at < count)
    tl.debug_barrier()


@triton.jit
def _ban_repeats(base, tokens, length, size, BLOCK: tl.constexpr):
    """Ban the tokens that would repeat a sequence of `size` tokens."""
    for begin in range(0, length - size + 1, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        repeats = at + size <= length
        for offset in range(size - 1):
            last = tl.load(tokens + length - size + 1 + offset)
            repeats = repeats & (tl.load(tokens + at + offset, repeats, other=-1) == last)
        banned = tl.load(tokens + at + size - 1, repeats, other=0)
        tl.store(base + banned, float("-inf"), repeats)
    tl.debug_barrier()


@triton.jit
def _ban_end(base, end_ids, count, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    token = tl.load(end_ids + at, at < count, other=0)
    tl.store(base + token, float("-inf"), at < count)
    tl.debug_barrier()


@triton.jit
def _mark(bits, token, inside):
    """Set the bits of tokens; return which of them this call is the first to set."""
    bit = tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)
    before = tl.atomic_or(bits + token // 32, bit, inside)
    return inside & (before & bit == 0)


@triton.jit
def _penalise(
    base, tokens, seen, prompt, length, repetition, presence, frequency, words, BLOCK: tl.constexpr
):
    """Apply the penalties to the tokens of a row. `seen`: 2 * words of bits, which stay zero."""
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, at < length, other=0)
        first = _mark(seen, token, at < length)
        x = tl.load(base + token, first, other=0.0)
        tl.store(base + token, tl.where(x > 0, x / repetition, x * repetition), first)
    tl.debug_barrier()
    for begin in range(prompt, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, at < length, other=0)
        tl.atomic_add(base + token, tl.zeros((BLOCK,), tl.float32) - frequency, at < length)
    tl.debug_barrier()
    for begin in range(prompt, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, at < length, other=0)
        first = _mark(seen + words, token, at < length)
        tl.store(base + token, tl.load(base + token, first, other=0.0) - presence, first)
    tl.debug_barrier()
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, at < length, other=0)
        tl.store(seen + token // 32, 0, at < length)
        tl.store(seen + words + token // 32, 0, at < length)


@CachedKernel
@triton.jit
def _adjust(
    logits,
    rows,
    lengths,
    tokens,
    table,
    bias_tokens,
    bias_values,
    end_ids,
    raw,
    seen,
    vocab,
    stride,
    tokens_stride,
    words,
    MAX_BIAS: tl.constexpr,
    MAX_END_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_and_trigger(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample).to(tl.int64)
    flags = read_field(table, row, FLAGS)
    if flags & ADJUSTS != 0:
        base = logits + sample * stride
        own = tokens + row * tokens_stride
        length = tl.load(lengths + sample)
        prompt = read_field(table, row, PROMPT_TOKENS)
        if flags & LOG_PROBS != 0:
            tl.store(raw + sample, _sum_logits(base, vocab, BLOCK))
            tl.debug_barrier()
        bias_count = read_field(table, row, BIAS_COUNT)
        _add_bias(
            base, bias_tokens + row * MAX_BIAS, bias_values + row * MAX_BIAS, bias_count, BLOCK
        )
        size = read_field(table, row, NGRAM)
        if size > 0:
            _ban_repeats(base, own, length, size, BLOCK)
        if length - prompt < read_field(table, row, MIN_TOKENS):
            _ban_end(
                base, end_ids + row * MAX_END_IDS, read_field(table, row, END_COUNT), MAX_END_IDS
            )
        repetition = read_real(table, row, REPETITION)
        presence = read_real(table, row, PRESENCE)
        frequency = read_real(table, row, FREQUENCY)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            _penalise(
                base, own, seen + sample * 2 * words, prompt, length,
                repetition, presence, frequency, words, BLOCK,
            )  # fmt: skip


def adjust(
    logits: Tensor,  # float32 [samples, vocab], changed in place
    rows: Tensor,  # int32 [samples]
    lengths: Tensor,  # int32 [samples]: number of tokens that each row knows
    tokens: Tensor,  # int64 [rows of the engine, longest]
    table: SamplingTable,
    scratch: Scratch,
) -> None:
    """Change the logits of rows with a bias, penalties or bans."""
    samples, vocab = logits.shape
    _adjust[(samples,)](
        logits,
        rows,
        lengths,
        tokens,
        table.fields,
        table.bias_tokens,
        table.bias_values,
        table.end_ids,
        scratch.raw,
        scratch.seen,
        vocab,
        logits.stride(0),
        tokens.stride(0),
        scratch.seen.shape[1] // 2,
        MAX_BIAS=table.bias_tokens.shape[1],
        MAX_END_IDS=table.end_ids.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
        **overlapping(logits.device),
    )
