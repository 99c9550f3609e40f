"""Carries plans out on a GPU: nothing waits for the device between launch and result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine import sampler, scores
from slipstream.engine.cache.host_cache import HostCache
from slipstream.engine.gpu.graphs import DecodeGraphs, aligned, ladder
from slipstream.engine.gpu.mixed_graphs import SIZES, MixedGraphs
from slipstream.engine.plan import StepFailed, StepPlan, StepResult
from slipstream.engine.rows import Rows
from slipstream.engine.runner import copy_blocks, sampling_places
from slipstream.engine.transfer import numbers, to_device
from slipstream.kernels import packed_cache
from slipstream.kernels.adapters import AdapterPages
from slipstream.kernels.gpu.adapters import TILE_TOKENS, GpuStepAdapters, Tiles, cut_adapter_tiles
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_attention import fits_one_warp
from slipstream.kernels.gpu.decode_chunks import (
    CHUNK_FIELDS,
    DecodePlan,
    count_resident_ctas,
    cut_chunks,
)
from slipstream.kernels.gpu.launch import power_of_two
from slipstream.kernels.gpu.prefill_tiles import (
    LARGE_TILES_FROM,
    PrefillPlan,
    cut_tiles,
    use_large_tiles,
)
from slipstream.kernels.gpu.step import step_inputs, write_back
from slipstream.kernels.gpu.unpacked_kv import UnpackedKv, plan_unpacking, unpacking_pays
from slipstream.model.transformer import Step, Transformer


class GpuHandle:
    """A launched plan; its tokens travel to the host while the next plan is made."""

    def __init__(
        self, sampled: sampler.Sampled | None, prompts: Sequence[scores.PromptLogits] = ()
    ) -> None:
        self._sampled = sampled
        self._prompts = prompts
        if sampled is not None:
            self._tokens, self._best = _to_host(sampled.tokens), _to_host(sampled.best)
            self._log_probs = None if sampled.log_probs is None else _to_host(sampled.log_probs)
            self._top = [
                (index, _to_host(tokens), _to_host(values)) for index, tokens, values in sampled.top
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._sampled is None:
            return StepResult(tokens=[], prompt_scores=scores.to_scores(self._prompts))
        self._event.synchronize()
        moved = self._sampled._replace(
            tokens=self._tokens, best=self._best, log_probs=self._log_probs, top=self._top
        )
        result = sampler.to_result(moved)
        result.prompt_scores = scores.to_scores(self._prompts)
        return result


class GpuRunner:
    def __init__(
        self,
        model: Transformer,
        total_blocks: int,
        block_tokens: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        group = model.spec.heads // model.spec.kv_heads
        one_warp = model.cache_dtype == packed_cache.DTYPE and fits_one_warp(
            group, model.spec.head_size
        )
        self.resident_ctas = count_resident_ctas(model.device, one_warp)
        self.rows = Rows(max_rows, max_tokens + 1, -(-max_tokens // block_tokens), model.device)
        self.cache = model.new_cache((total_blocks + 1) * block_tokens)  # with the null block
        self.host: HostCache | None = None  # for blocks that the cache has no room for
        self.graphs = DecodeGraphs(model, self.cache, self.rows, block_tokens, self.resident_ctas)
        self.mixed = MixedGraphs(model, self.cache, self.rows, block_tokens, self.resident_ctas)
        self.adapters: AdapterPages | None = None  # none before the first adapter comes
        # [rows, 1 + pages]: how many pages a row's adapter has, then those
        self._row_pages: Tensor | None = None

    @torch.inference_mode()
    def capture(
        self, largest: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Record decode steps of up to `largest` rows, and steps with few tokens of prompts."""
        decodes = len(ladder(largest))
        mixed = len(SIZES) if self.model.options.mixed_graphs else 0
        total = decodes + mixed
        self.graphs.capture(largest, lambda done: progress(done, total))
        if mixed:
            self.mixed.capture(self.graphs.pool, lambda done: progress(decodes + done, total))

    def launch(self, plan: StepPlan) -> GpuHandle:
        # even where the step then fails: what moves is already known under its new place
        self._move_blocks(plan)
        try:
            return self._launch(plan)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise StepFailed(
                f"the GPU ran out of memory in a step of {plan.tokens} tokens: send a shorter prompt, or lower "
                "kv_cache_free_gpu_mem_fraction or max_num_tokens"
            ) from error

    @torch.inference_mode()
    def _move_blocks(self, plan: StepPlan) -> None:
        if self.host is not None:
            self.host.move(plan)
        copy_blocks(self.cache, plan.copies, self.block_tokens)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> GpuHandle:
        self.rows.apply(plan)
        if self.adapters is not None:
            self._write_row_pages(self.adapters, plan)
        decodes = max(plan.counts) == 1 and all(plan.samples) and not self.rows.in_prompt(plan)
        if decodes and self.graphs.rung(len(plan.rows)) is not None:
            return self._replay(plan)
        return self._run(plan)

    def _replay(self, plan: StepPlan) -> GpuHandle:
        adapters = None
        if (
            self.adapters is not None
            and self._row_pages is not None
            and self._has_adapter(plan.rows)
        ):
            adapters = (self.adapters, self._row_pages)
        logits, best, tokens = self.graphs.replay(plan.rows, plan.positions, adapters)
        lengths = [position + 1 for position in plan.positions]
        if sampler.all_plain(plan.rows, self.rows):
            return GpuHandle(sampler.Sampled(tokens, best, None, []))
        sampled = sampler.sample(logits, plan.rows, lengths, self.rows)
        self._write_back(plan.rows, lengths, sampled.tokens)
        return GpuHandle(sampled)

    def _run(self, plan: StepPlan) -> GpuHandle:
        # decodes first
        order = sorted(range(len(plan.rows)), key=lambda index: plan.counts[index] > 1)
        rows, positions, counts = (
            np.array([column[i] for i in order])
            for column in (plan.rows, plan.positions, plan.counts)
        )
        samples = np.array([plan.samples[i] for i in order])
        drafts = [plan.drafts[i] for i in order]
        wanted = scores.wanted_logits(
            rows.tolist(), positions, counts, samples, self.rows, order, drafts
        )
        far_back = self._looks_far_back(positions[counts > 1], counts[counts > 1])
        size = None if wanted.prompts or far_back else self.mixed.size(counts, wanted.tokens)
        table = self.rows.prompts.of_step(rows, positions, counts)
        if size is not None and table is None and not self._has_adapter(rows.tolist()):
            logits = self.mixed.replay(size, rows, positions, counts, wanted.tokens)
        else:
            step = self._step(rows, positions, counts, self._padded(wanted.tokens), table)
            logits = self.model(step, self.cache)[: len(wanted.tokens)]
        prompts = scores.prompt_logits(logits, wanted, self.rows)
        if not samples.any():
            return GpuHandle(None, prompts)
        if wanted.samples is not None:
            logits = logits[to_device(wanted.samples, self.model.device)]
        sampled_rows, lengths = sampling_places(plan, order)
        sampled = sampler.sample(logits, sampled_rows, lengths, self.rows)
        self._write_back(sampled_rows, lengths, sampled.tokens)
        return GpuHandle(_in_plan_order(sampled, order, plan), prompts)

    def _step(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        wanted: np.ndarray,
        table: tuple[Tensor, Tensor] | None,
    ) -> Step:
        ends = np.cumsum(counts)
        offsets = ends - counts
        row_of_token = np.repeat(rows, counts)
        position_of_token = np.arange(ends[-1]) + np.repeat(positions - offsets, counts)
        decodes = int((counts == 1).sum())
        chunks = cut_chunks(
            rows[:decodes],
            (positions + counts)[:decodes],
            self.model.spec.kv_heads,
            self.resident_ctas,
        )
        several = slice(decodes, None)
        longest = int((positions + counts)[several].max(initial=0))
        large_tiles = use_large_tiles(
            longest, self.model.dtype, self.model.spec.head_size, self.model.device
        )
        unpacked = self._unpacked_kv(rows[several], positions[several], counts[several])
        tables = rows[several] if unpacked is None else np.arange(len(rows) - decodes)
        tiles = cut_tiles(
            tables, positions[several], counts[several], offsets[several], large_tiles
        )
        parts = _pack(
            [row_of_token, position_of_token, wanted, chunks.ravel(), *tiles],
            self.model.device,
        )
        row_tokens, token_positions, sampled, cut = parts[:4]
        ids, slots = step_inputs(
            row_tokens, token_positions, self.rows.tokens, self.rows.tables, self.block_tokens
        )
        prefill = None
        if decodes < len(rows):
            prefill = PrefillPlan(*parts[4:9], large_tiles=large_tiles)  # type: ignore[misc, arg-type]
        attention = GpuAttention(
            self.rows.tables,
            self.block_tokens,
            self.resident_ctas,
            decodes,
            DecodePlan(cut.view(-1, CHUNK_FIELDS)) if decodes else None,
            prefill,
            unpacked,
        )
        adapters = self._step_adapters(rows, counts)
        return Step(
            ids,
            token_positions,
            slots,
            attention,
            sampled,
            adapters,
            self._place(len(wanted)),
            table,
        )

    def _looks_far_back(self, positions: np.ndarray, counts: np.ndarray) -> bool:
        """Whether unpacking beforehand, which no graph does, is worth more to rows with several new
        tokens.
        """
        return positions.max(initial=0) >= LARGE_TILES_FROM and self._unpacks(positions, counts)

    def _unpacks(self, positions: np.ndarray, counts: np.ndarray) -> bool:
        packed = self.cache.dtype == packed_cache.DTYPE
        return packed and unpacking_pays(
            positions, counts, self.block_tokens, 4 * self.model.spec.kv_size
        )

    def _unpacked_kv(
        self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> UnpackedKv | None:
        """What rows with several new tokens look back at, to be unpacked before they do, where that
        pays.
        """
        spec, block_tokens = self.model.spec, self.block_tokens
        if not self._unpacks(positions, counts):
            return None
        where, tables = plan_unpacking(rows, positions, block_tokens, self.rows.tables.shape[1])
        blocks = self.rows.tables.view(-1)[to_device(where, self.model.device)]
        # By powers of two: each step of a long prompt looks back further than what the last one
        # left has room for.
        shape = (2, spec.kv_heads, power_of_two(len(where)) * block_tokens, spec.head_size)
        try:
            keys, values = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        except torch.OutOfMemoryError:
            return None  # then it is unpacked while it is looked at
        return UnpackedKv(blocks, to_device(tables, self.model.device), keys, values, block_tokens)

    def _padded(self, wanted: np.ndarray) -> np.ndarray:
        """The tokens whose logits are wanted, and others behind them up to a number that was met
        when the engine started: at each new one the library would load kernels, and the device
        waits meanwhile.
        """
        rung = self.graphs.rung(len(wanted)) if len(wanted) else None
        return wanted if rung is None else np.pad(wanted, (0, rung - len(wanted)))

    def _place(self, logits: int) -> Tensor | None:
        """Where a step's logits go: memory of their own would have another size at every step, and
        asking the driver for it takes time.
        """
        place = self.graphs.logits
        return place[:logits] if place is not None and logits <= len(place) else None

    def _has_adapter(self, rows: Iterable[int]) -> bool:
        return any(self.rows.pages[row] for row in rows)

    def _step_adapters(self, rows: np.ndarray, counts: np.ndarray) -> GpuStepAdapters | None:
        if self.adapters is None or self._row_pages is None or not self._has_adapter(rows.tolist()):
            return None
        starts, sizes, tile_rows = _pack(list(cut_adapter_tiles(rows, counts)), self.model.device)
        return GpuStepAdapters(
            self.adapters, self._row_pages, Tiles(starts, sizes, tile_rows, TILE_TOKENS)
        )

    def _write_row_pages(self, adapters: AdapterPages, plan: StepPlan) -> None:
        if self._row_pages is None:
            size = (self.rows.padding_row + 1, 1 + adapters.most_pages)
            self._row_pages = torch.zeros(size, dtype=torch.int32, device=self.model.device)
        if plan.starts:
            lines = np.zeros((len(plan.starts), 1 + adapters.most_pages), dtype=np.int32)
            for line, start in zip(lines, plan.starts, strict=True):
                line[: 1 + len(start.pages)] = len(start.pages), *start.pages
            rows = to_device(np.array([start.row for start in plan.starts]), self.model.device)
            self._row_pages[rows] = to_device(lines, self.model.device)

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
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def _in_plan_order(sampled: sampler.Sampled, order: list[int], plan: StepPlan) -> sampler.Sampled:
    """Results in the order of the plan's sampling rows, from the order they were computed in."""
    computed = [
        (column, draft)
        for column in order
        if plan.samples[column]
        for draft in range(1 + plan.drafts[column])
    ]
    if computed == sorted(computed):
        return sampled
    place = sorted(range(len(computed)), key=computed.__getitem__)
    top_at = {computed_at: plan_at for plan_at, computed_at in enumerate(place)}
    where = numbers(place, sampled.tokens.device)
    log_probs = None if sampled.log_probs is None else sampled.log_probs[where]
    top = [(top_at[index], tokens, values) for index, tokens, values in sampled.top]
    raw = [(top_at[index], logits) for index, logits in sampled.raw]
    return sampler.Sampled(sampled.tokens[where], sampled.best[where], log_probs, top, raw)
