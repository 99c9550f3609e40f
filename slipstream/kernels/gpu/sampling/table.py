"""The sampling parameters of all rows in device memory, and the memory of the sampling kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import pieces
from slipstream.kernels.gpu.sampling.in_torch import hash_tokens

# Columns of the table, one line of int32 values per row. Real numbers are stored by their bits.
FIELDS = 32
_LINE = tl.constexpr(FIELDS)
FLAGS = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)
TOP_K = tl.constexpr(2)  # 0: off
TOP_P = tl.constexpr(3)  # 1: off
LOG_MIN_P = tl.constexpr(4)  # -inf: off
TYPICAL_P = tl.constexpr(5)  # 1: off; not with top-p
REPETITION = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
FREQUENCY = tl.constexpr(8)
SEED_LOW = tl.constexpr(9)
SEED_HIGH = tl.constexpr(10)
PROMPT_TOKENS = tl.constexpr(11)
MIN_TOKENS = tl.constexpr(12)
NGRAM = tl.constexpr(13)  # length of token sequences that may not occur twice; 0: off
BIAS_COUNT = tl.constexpr(14)
END_COUNT = tl.constexpr(15)
# number of likeliest tokens to report; only with LOG_PROBS, without ADJUSTS and MASKED
TOP_COUNT = tl.constexpr(16)
# Bits of FLAGS. A row without any takes the likeliest token.
DRAWS = tl.constexpr(1)
ADJUSTS = tl.constexpr(2)  # bias, penalties or bans change logits (adjustments.py)
LOG_PROBS = tl.constexpr(4)
MASKED = tl.constexpr(8)  # only the tokens of the row's mask may be sampled

MAX_TOP_K = 1024
MAX_BIAS = 512  # entries of a row's logit bias
MAX_END_IDS = 16
MAX_TOP_COUNT = 32

PARTS = 32  # CTAs per row of logits
PART_FIELDS = 14  # numbers that each of them stores
GROUP = 64  # neighbouring tokens whose largest logit is stored


class SamplingTable(NamedTuple):
    """The sampling parameters of all rows, in device memory."""

    fields: Tensor  # int32 [rows, FIELDS]
    masks: Tensor  # int32 [rows, words]: a bit for each token that the row may sample
    bias_tokens: Tensor  # int32 [rows, MAX_BIAS]
    bias_values: Tensor  # float32 [rows, MAX_BIAS]
    end_ids: Tensor  # int32 [rows, MAX_END_IDS]
    hashes: Tensor  # int32 [vocab]: of the tokens, for the noise of draws

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> SamplingTable:
        """Return the table of rows that take the likeliest token."""

        def zeros(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((rows, width), dtype=dtype, device=device)

        return cls(
            fields=zeros(FIELDS),
            masks=zeros(pieces(vocab, 32)),
            bias_tokens=zeros(MAX_BIAS),
            bias_values=zeros(MAX_BIAS, torch.float32),
            end_ids=zeros(MAX_END_IDS),
            hashes=hash_tokens(vocab).to(device),
        )


class Scratch(NamedTuple):
    """Memory for the values that the kernels of a step pass to each other."""

    parts: Tensor  # float32 [samples, PART_FIELDS, PARTS]
    groups: Tensor  # float32 [samples, groups]: the largest logit of each group
    lists: Tensor  # int32 [samples, groups]: the groups that top-k looks at
    kept: Tensor  # int32 [samples, 2, MAX_TOP_K]: the tokens that top-k keeps, their logits
    raw: Tensor  # float32 [samples]: the logsumexp of logits before they are adjusted
    seen: Tensor  # int32 [samples, 2 * words]: bits of tokens, zero between any two kernels

    @classmethod
    def empty(cls, samples: int, vocab: int, device: torch.device) -> Scratch:
        groups = pieces(vocab, GROUP)

        def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((samples, *shape), dtype=dtype, device=device)

        return cls(
            parts=some(PART_FIELDS, PARTS),
            groups=some(groups),
            lists=some(groups, dtype=torch.int32),
            kept=some(2, MAX_TOP_K, dtype=torch.int32),
            raw=some(),
            seen=some(2 * pieces(vocab, 32), dtype=torch.int32).zero_(),
        )


class Drawn(NamedTuple):
    tokens: Tensor  # int64 [samples]
    # float32 [samples]: the largest logit; nan if there is one, -inf if no token is allowed
    best: Tensor
    log_probs: Tensor  # float32 [samples]: of the token, nan for rows that do not report it
    # float32 [samples, 2, MAX_TOP_COUNT]: the likeliest tokens, by their bits, and their
    # log-probabilities, in no order; -inf behind the last one; only for rows that report them
    top: Tensor

    @classmethod
    def empty(cls, samples: int, device: torch.device) -> Drawn:
        def reals(*shape: int) -> Tensor:
            return torch.empty((samples, *shape), dtype=torch.float32, device=device)

        return cls(
            tokens=torch.empty(samples, dtype=torch.int64, device=device),
            best=reals(),
            log_probs=reals(),
            top=reals(2, MAX_TOP_COUNT),
        )


@triton.jit
def read_field(table, row, FIELD: tl.constexpr):
    return tl.load(table + row * _LINE + FIELD)


@triton.jit
def read_real(table, row, FIELD: tl.constexpr):
    return tl.load(table + row * _LINE + FIELD).to(tl.float32, bitcast=True)
