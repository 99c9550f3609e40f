"""Carries plans out on a GPU: nothing waits for the device between launch and result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.engine import sampler
from slipstream.engine.graphs import DecodeGraphs, aligned
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.rows import Rows, to_device
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_attention import DecodePlan, cut_chunks, programs_of
from slipstream.kernels.gpu.prefill_attention import PrefillPlan, cut_tiles
from slipstream.kernels.gpu.step import step_inputs, write_back
from slipstream.model.transformer import Step, Transformer


class GpuHandle:
    """A launched plan; its tokens travel to the host while the next plan is made."""

    def __init__(self, sampled: sampler.Sampled | None) -> None:
        self._sampled = sampled
        if sampled is not None:
            self._tokens, self._best = _to_host(sampled.tokens), _to_host(sampled.best)
            self._log_probs = None if sampled.log_probs is None else _to_host(sampled.log_probs)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._sampled is None:
            return StepResult(tokens=[])
        self._event.synchronize()
        return sampler.to_result(sampler.Sampled(self._tokens, self._best, self._log_probs, self._sampled.top))


class GpuRunner:
    def __init__(
        self, model: Transformer, total_blocks: int, block_tokens: int, max_rows: int, max_tokens: int
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.programs = programs_of(model.device)
        self.rows = Rows(max_rows, max_tokens + 1, -(-max_tokens // block_tokens), model.device)
        self.cache = model.new_cache((total_blocks + 1) * block_tokens)  # with the null block
        self.graphs = DecodeGraphs(model, self.cache, self.rows, block_tokens, self.programs)

    @torch.inference_mode()
    def capture(self, largest: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record decode steps of up to `largest` rows."""
        self.graphs.capture(largest, progress)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> GpuHandle:
        self.rows.apply(plan)
        if max(plan.counts) == 1 and all(plan.samples) and self.graphs.rung(len(plan.rows)) is not None:
            return self._replay(plan)
        return self._run(plan)

    def _replay(self, plan: StepPlan) -> GpuHandle:
        logits, best, tokens = self.graphs.replay(plan.rows, plan.positions)
        lengths = [position + 1 for position in plan.positions]
        if sampler.all_plain(plan.rows, self.rows):
            return GpuHandle(sampler.Sampled(tokens, best, None, []))
        sampled = sampler.sample(logits, plan.rows, lengths, self.rows)
        self._write_back(plan.rows, lengths, sampled.tokens)
        return GpuHandle(sampled)

    def _run(self, plan: StepPlan) -> GpuHandle:
        order = sorted(range(len(plan.rows)), key=lambda index: plan.counts[index] > 1)  # decodes first
        rows, positions, counts = (np.array([column[i] for i in order]) for column in (
            plan.rows, plan.positions, plan.counts))
        samples = np.array([plan.samples[i] for i in order])
        logits = self.model(self._step(rows, positions, counts, samples), self.cache)
        if not samples.any():
            return GpuHandle(None)
        sampled_rows, lengths = rows[samples].tolist(), (positions + counts)[samples].tolist()
        sampled = sampler.sample(logits, sampled_rows, lengths, self.rows)
        self._write_back(sampled_rows, lengths, sampled.tokens)
        return GpuHandle(_in_plan_order(sampled, order, plan.samples))

    def _step(self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray, samples: np.ndarray) -> Step:
        ends = np.cumsum(counts)
        offsets = ends - counts
        row_of_token = np.repeat(rows, counts)
        position_of_token = np.arange(ends[-1]) + np.repeat(positions - offsets, counts)
        decodes = int((counts == 1).sum())
        first, chunk_row, chunk_start, size = cut_chunks(
            (positions + counts)[:decodes], self.model.spec.kv_heads, self.programs)
        tiles = cut_tiles(rows[decodes:], positions[decodes:], counts[decodes:], offsets[decodes:])
        parts = _pack(
            [row_of_token, position_of_token, (ends - 1)[samples], rows[:decodes], (positions + counts)[:decodes],
             first, chunk_row, chunk_start, np.array([len(chunk_row), size]), *tiles],
            self.model.device,
        )  # fmt: skip
        row_tokens, token_positions, sampled = parts[:3]
        ids, slots = step_inputs(row_tokens, token_positions, self.rows.tokens, self.rows.tables, self.block_tokens)
        attention = GpuAttention(
            self.rows.tables, self.block_tokens, self.programs, decodes,
            DecodePlan(*parts[3:9]) if decodes else None,
            PrefillPlan(*parts[9:]) if decodes < len(rows) else None,
        )  # fmt: skip
        return Step(ids, token_positions, slots, attention, sampled)

    def _write_back(self, rows: list[int], lengths: list[int], tokens: Tensor) -> None:
        row, length = _pack([np.array(rows), np.array(lengths)], self.model.device)
        write_back(row, length, tokens, self.rows.tokens)


def _pack(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """All arrays as int32 on the device, by one copy."""
    starts = np.cumsum([0] + [aligned(len(array)) for array in arrays])
    joined = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        joined[start : start + len(array)] = array
    moved = to_device(joined, device)
    return [moved[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _in_plan_order(sampled: sampler.Sampled, order: list[int], samples: list[bool]) -> sampler.Sampled:
    """Results in the order of the plan's sampling rows, from the order they were computed in."""
    computed = [index for index in order if samples[index]]
    if computed == sorted(computed):
        return sampled
    place = sorted(range(len(computed)), key=computed.__getitem__)
    top_at = {computed_at: plan_at for plan_at, computed_at in enumerate(place)}
    log_probs = None if sampled.log_probs is None else sampled.log_probs[place]
    top = [(top_at[index], tokens, values) for index, tokens, values in sampled.top]
    return sampler.Sampled(sampled.tokens[place], sampled.best[place], log_probs, top)
