"""The sampling parameters of a runner's rows on the device, and which rows the kernels serve.

Plans start rows; their parameters travel to the device once, in one copy for all rows that start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.gpu.sampler import Likeliest
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.with_torch.transfer import PinnedBuffers, to_device
from slipstream.kernels.gpu.launch import pieces
from slipstream.kernels.gpu.sampling import table as columns
from slipstream.kernels.gpu.sampling.adjust import adjust
from slipstream.kernels.gpu.sampling.draw import draw
from slipstream.kernels.gpu.sampling.table import (
    FIELDS,
    MAX_BIAS,
    MAX_END_IDS,
    MAX_TOP_COUNT,
    MAX_TOP_K,
    Drawn,
    SamplingTable,
    Scratch,
)

_ADJUSTS = columns.ADJUSTS.value
_DRAWS = columns.DRAWS.value
_LOG_PROBS = columns.LOG_PROBS.value
_MASKED = columns.MASKED.value
_FLAGS = columns.FLAGS.value

_LARGE_BIAS = 1000.0  # of a logit, beyond which it has too few digits left


class SamplingRows:
    def __init__(
        self, rows: int, vocab: int, device: torch.device, deterministic: bool = False
    ) -> None:
        """rows: with the padding row; deterministic: a draw never depends on the other rows"""
        self.vocab = vocab
        self.device = device
        self.deterministic = deterministic
        self.table = SamplingTable.empty(rows, vocab, device)
        self.scratch = Scratch.empty(rows, vocab, device)
        self._flags = np.zeros(rows, dtype=np.int32)  # as the device has them
        self._own_flags = np.zeros(rows, dtype=np.int32)  # without the mask of a step
        # rows with parameters that the kernels do not know: their flags are 0
        self._external: set[int] = set()
        self.external: set[int] = set()  # in the step: these, and rows with several masks
        self._masked = False  # the step before had masks
        self.reporting: set[int] = set()  # rows that report log-probabilities
        self.top_counts: dict[int, int] = {}  # row → likeliest tokens that it reports
        self._buffers = PinnedBuffers()

    def apply(self, plan: StepPlan) -> None:
        """Write the parameters of rows that start, and the masks of the step."""
        if plan.starts:
            self._start(plan.starts)
        self.external = self._external
        if plan.masks or self._masked:
            self._write_masks(plan.masks)

    def _start(self, starts: Sequence[RowStart]) -> None:
        lines = np.stack([self._line(start) for start in starts])
        rows = np.array([start.row for start in starts], dtype=np.int64)
        self._flags[rows] = self._own_flags[rows] = lines[:, _FLAGS]
        self.table.fields[to_device(rows, self.device)] = to_device(lines, self.device)
        self._write_lists(
            [start for start, line in zip(starts, lines, strict=True) if line[_FLAGS]]
        )

    def _line(self, start: RowStart) -> np.ndarray:
        """Return a row's line of the table, int32 [FIELDS]."""
        row = start.row
        p = start.sampling
        self._external.discard(row)
        self.reporting.discard(row)
        self.top_counts.pop(row, None)
        if needs_torch_sampler(p, self.vocab):
            self._external.add(row)
            return np.zeros(FIELDS, dtype=np.int32)
        if p.log_probs or p.top_log_probs:
            self.reporting.add(row)
        if p.top_log_probs:
            self.top_counts[row] = p.top_log_probs
        return encode(p, start.prompt_tokens)

    def _write_lists(self, starts: Sequence[RowStart]) -> None:
        """Write the bias, the end tokens and the allowed tokens of rows that have them."""
        bias_tokens = {}
        bias_values = {}
        end_ids = {}
        masks = {}
        for start in starts:
            row = start.row
            p = start.sampling
            if p.logit_bias:
                bias = _sum_bias(p.logit_bias)
                bias_tokens[row] = np.array(list(bias), dtype=np.int32)
                bias_values[row] = np.array(list(bias.values()), dtype=np.float32)
            if p.min_tokens and p.end_ids:
                end_ids[row] = np.array(p.end_ids, dtype=np.int32)
            if p.allowed_tokens:
                bits = np.zeros(pieces(self.vocab, 32) * 32, dtype=np.uint8)
                bits[np.array(p.allowed_tokens)] = 1
                masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
        self._write_lines(self.table.bias_tokens, bias_tokens)
        self._write_lines(self.table.bias_values, bias_values)
        self._write_lines(self.table.end_ids, end_ids)
        self._write_lines(self.table.masks, masks)

    def _write_lines(self, target: Tensor, lines: dict[int, np.ndarray]) -> None:
        """Write the beginning of some rows of a tensor, with one copy for all of them."""
        if not lines:
            return
        width = max(len(line) for line in lines.values())
        staged = np.zeros((len(lines), width), dtype=next(iter(lines.values())).dtype)
        for place, line in zip(staged, lines.values(), strict=True):
            place[: len(line)] = line
        rows = to_device(np.array(list(lines)), self.device)
        target[:, :width][rows] = to_device(staged, self.device)

    def _write_masks(self, masks: dict[int, bytes]) -> None:
        """Write the masks of a step to the rows that have one, and clear those of the step before.

        Rows with several samples have several masks, and are not for these kernels.
        """
        one_mask = 4 * self.table.masks.shape[1]
        several = {row for row, mask in masks.items() if len(mask) != one_mask}
        self.external = self._external | several
        wanted = self._own_flags.copy()
        rows = [row for row in masks if row not in self.external]
        wanted[rows] |= _MASKED
        wanted[list(several)] = 0
        self._masked = bool(masks)
        (changed,) = np.nonzero(wanted != self._flags)
        if len(changed):
            places = to_device(changed, self.device)
            self.table.fields[places, _FLAGS] = to_device(wanted[changed], self.device)
            self._flags = wanted
        if rows:
            words = np.stack([np.frombuffer(masks[row], dtype=np.int32) for row in rows])
            lines = np.array(rows, dtype=np.int64)
            self.table.masks[to_device(lines, self.device)] = self._buffers.to_device(
                words, self.device
            )

    def sample(self, logits: Tensor, rows: Tensor, lengths: Tensor, tokens: Tensor) -> Drawn:
        """Draw a token for each of `rows`, by the table.

        logits: float32 [samples, vocab], changed in place; rows, lengths: int32 [samples];
        tokens: int64 [rows of the engine, longest]
        """
        most = len(self.scratch.parts)
        if len(rows) > most:  # rows with draft tokens have several samples
            first = self.sample(logits[:most], rows[:most], lengths[:most], tokens)
            others = self.sample(logits[most:], rows[most:], lengths[most:], tokens)
            return Drawn(*(torch.cat(both) for both in zip(first, others, strict=True)))
        adjust(logits, rows, lengths, tokens, self.table, self.scratch)
        return draw(logits, rows, lengths, tokens, self.table, self.scratch, self.deterministic)

    def find_likeliest(self, drawn: Drawn, rows: Sequence[int]) -> Likeliest | None:
        """Return the likeliest tokens of the samples that report them; None if there are none."""
        if not self.top_counts:
            return None
        samples = {
            index: (index, self.top_counts[row])
            for index, row in enumerate(rows)
            if row in self.top_counts
        }
        return Likeliest(samples, drawn.top) if samples else None


def needs_torch_sampler(p: SamplingParams, vocab: int) -> bool:
    """Return whether a row's parameters are not supported by the sampling kernels."""
    draws = not p.greedy
    narrow = p.top_p < 1.0 or p.min_p > 0.0
    return bool(
        p.beams
        or p.generation_logits
        or p.top_log_probs > MAX_TOP_COUNT
        # reported are the likeliest tokens of the model's own logits
        or (p.top_log_probs and (_adjusts(p) or p.allowed_tokens or p.constrained))
        or p.bad_words
        or (draws and p.top_p_decay < 1.0)
        or (draws and MAX_TOP_K < p.top_k < vocab)
        or (draws and p.typical_p < 1.0 and narrow)
        or (p.allowed_tokens and p.constrained)
        or (p.min_tokens and len(p.end_ids) > MAX_END_IDS)
        or len(p.logit_bias) > MAX_BIAS
        # the model's own logit is computed from the sum, which has lost it
        or (p.log_probs and any(abs(value) > _LARGE_BIAS for _, value in p.logit_bias))
    )


def _adjusts(p: SamplingParams) -> bool:
    """Return whether the logits of single tokens change before the row samples."""
    bans_end = p.min_tokens and p.end_ids
    return bool(p.penalised or p.logit_bias or p.no_repeat_ngram or bans_end)


def encode(p: SamplingParams, prompt_tokens: int) -> np.ndarray:
    """Return a line of the table: int32 [FIELDS]."""
    line = np.zeros(FIELDS, dtype=np.int32)
    reals = line.view(np.float32)
    bans_end = bool(p.min_tokens and p.end_ids)
    adjusts = _adjusts(p)
    line[_FLAGS] = (
        _DRAWS * (not p.greedy)
        | _ADJUSTS * adjusts
        | _LOG_PROBS * (p.log_probs or p.top_log_probs > 0)
        | _MASKED * bool(p.allowed_tokens)
    )
    reals[columns.TEMPERATURE.value] = p.temperature
    line[columns.TOP_K.value] = p.top_k if p.top_k <= MAX_TOP_K else 0
    reals[columns.TOP_P.value] = p.top_p
    reals[columns.LOG_MIN_P.value] = math.log(p.min_p) if p.min_p > 0 else -math.inf
    reals[columns.TYPICAL_P.value] = p.typical_p
    reals[columns.REPETITION.value] = p.repetition_penalty
    reals[columns.PRESENCE.value] = p.presence_penalty
    reals[columns.FREQUENCY.value] = p.frequency_penalty
    seed = np.array([p.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64).view(np.int32)
    line[columns.SEED_LOW.value], line[columns.SEED_HIGH.value] = seed
    line[columns.PROMPT_TOKENS.value] = prompt_tokens
    line[columns.MIN_TOKENS.value] = p.min_tokens if bans_end else 0
    line[columns.NGRAM.value] = p.no_repeat_ngram
    line[columns.BIAS_COUNT.value] = len(_sum_bias(p.logit_bias))
    line[columns.END_COUNT.value] = len(p.end_ids) if bans_end else 0
    line[columns.TOP_COUNT.value] = p.top_log_probs
    return line


def _sum_bias(bias: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return the bias of each token, the sum of its entries."""
    total: dict[int, float] = {}
    for token, value in bias:
        total[token] = total.get(token, 0.0) + value
    return total
