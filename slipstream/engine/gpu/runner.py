"""Carries out plans on a GPU. Nothing waits for the device between launch and result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from slipstream.engine import pooling, scores
from slipstream.engine.cache.host_cache import HostCache
from slipstream.engine.gpu import sampler
from slipstream.engine.gpu.device_arrays import DeviceArrays
from slipstream.engine.gpu.graphs import DecodeGraphs, GraphContext, batch_sizes
from slipstream.engine.gpu.handle import GpuHandle
from slipstream.engine.gpu.mixed_graphs import MixedGraphs, sizes_to_capture
from slipstream.engine.gpu.sampling_rows import SamplingRows
from slipstream.engine.gpu.scores import prompt_logits
from slipstream.engine.gpu.step_arrays import (
    EMPTY,
    StepArrays,
    StepRows,
    decode_plan,
    pack,
    prefill_plan,
    sort_rows,
    to_device_arrays,
)
from slipstream.engine.plan import StepFailed, StepPlan, sampling_places
from slipstream.engine.rows import Rows
from slipstream.engine.sampler import Sampled
from slipstream.engine.with_torch.runner import copy_blocks
from slipstream.engine.with_torch.transfer import list_to_device, to_device
from slipstream.kernels import packed_cache
from slipstream.kernels.adapters import AdapterPages
from slipstream.kernels.gpu.adapters import TILE_TOKENS, GpuStepAdapters, Tiles, cut_adapter_tiles
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_attention import fits_one_warp
from slipstream.kernels.gpu.decode_chunks import count_resident_ctas, cut_chunks
from slipstream.kernels.gpu.launch import power_of_two
from slipstream.kernels.gpu.prefill_tiles import LARGE_TILES_FROM, cut_tiles, use_large_tiles
from slipstream.kernels.gpu.sampling.table import Drawn
from slipstream.kernels.gpu.step import step_inputs, write_back
from slipstream.kernels.gpu.unpacked_kv import UnpackedKv, plan_unpacking, unpacking_pays
from slipstream.model.transformer import Step, Transformer


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
        self.rows = Rows(
            max_rows, max_tokens + 1, -(-max_tokens // block_tokens), DeviceArrays(model.device)
        )
        self.sampling = SamplingRows(
            max_rows + 1, model.spec.vocab_size, model.device, model.options.deterministic
        )
        self.cache = model.new_cache((total_blocks + 1) * block_tokens)  # with the null block
        self.host: HostCache | None = None  # host memory for evicted blocks
        context = GraphContext(model, self.cache, self.rows, block_tokens, self.resident_ctas)
        self.graphs = DecodeGraphs(context, self.sampling)
        self.mixed = MixedGraphs(context)
        self.adapters: AdapterPages | None = None  # None until the first adapter is loaded
        # [rows, 1 + pages]: the number of pages of a row's adapter, then the pages
        self._row_pages: Tensor | None = None

    @torch.inference_mode()
    def capture(
        self,
        largest: int,
        step_tokens: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
        fast_tokens: int = 0,
    ) -> None:
        """Capture decode steps of up to `largest` rows, and steps with few prompt tokens.

        step_tokens: budget of a step
        fast_tokens: tokens of a step that the GPU computes in the time of its launch
        """
        decodes = len(batch_sizes(largest))
        mixed = self.model.options.mixed_graphs
        sizes = sizes_to_capture(fast_tokens, step_tokens, largest) if mixed else []
        total = decodes + len(sizes)
        logit_rows = max((size.logits for size in sizes), default=0)
        self.graphs.capture(largest, lambda done: progress(done, total), logit_rows)
        if sizes:
            assert self.graphs.logits is not None
            self.mixed.fast_tokens = fast_tokens
            self.mixed.capture(
                sizes,
                self.graphs.pool,
                self.graphs.logits,
                lambda done: progress(decodes + done, total),
            )

    @torch.inference_mode()
    def run_captured_steps(self, largest: int) -> None:
        """Run the steps that `capture` captures, without capturing them."""
        self.graphs.run_all(largest)
        if self.model.options.mixed_graphs:
            self.mixed.run_all()

    def launch(self, plan: StepPlan) -> GpuHandle:
        # Blocks move even where the step then fails: the scheduler knows them by their new place.
        self._move_blocks(plan)
        try:
            return self._launch(plan)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise StepFailed(
                f"the GPU ran out of memory in a step of {plan.tokens} tokens: send a shorter "
                "prompt, or lower kv_cache_free_gpu_mem_fraction or max_num_tokens"
            ) from error

    @torch.inference_mode()
    def _move_blocks(self, plan: StepPlan) -> None:
        if self.host is not None:
            self.host.move(plan)
        copy_blocks(self.cache, plan.copies, self.block_tokens)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> GpuHandle:
        self.rows.apply(plan)
        self.sampling.apply(plan)
        if self.adapters is not None:
            self._write_row_pages(self.adapters, plan)
        decodes = max(plan.counts) == 1 and all(plan.samples) and not self.rows.in_prompt(plan)
        if self.model.options.deterministic and self._has_adapter(plan.rows):
            decodes = False  # single tokens have other kernels for adapters than prompts
        if decodes and self.graphs.captured_size(len(plan.rows)) is not None:
            return self._replay(plan)
        return self._run(plan)

    def _replay(self, plan: StepPlan) -> GpuHandle:
        """Run a decode step as a captured graph."""
        adapters = None
        if (
            self.adapters is not None
            and self._row_pages is not None
            and self._has_adapter(plan.rows)
        ):
            adapters = (self.adapters, self._row_pages)
        outputs = self.graphs.replay(plan.rows, plan.positions, adapters)
        lengths = [position + 1 for position in plan.positions]
        sampled = self._finish(outputs.drawn, outputs.logits, plan.rows, lengths)
        return GpuHandle(sampled, self.rows)

    def _run(self, plan: StepPlan) -> GpuHandle:
        """Run a step that is not a decode step."""
        step = sort_rows(plan)
        samples = np.array([plan.samples[entry] for entry in step.order])
        drafts = [plan.drafts[entry] for entry in step.order]
        selection = scores.select_logits(
            step.rows.tolist(), step.positions, step.counts, samples, self.rows, step.order, drafts
        )
        logits, pooled = self._forward(step, selection)
        prompts = prompt_logits(logits, selection, self.rows)
        if not samples.any():
            return GpuHandle(None, self.rows, prompts, pooled)
        if selection.samples is not None:
            logits = logits[to_device(selection.samples, self.model.device)]
        sampled_rows, lengths = sampling_places(plan, step.order)
        logits = logits.float()
        row, length = pack([np.array(sampled_rows), np.array(lengths)], self.model.device)
        drawn = self.sampling.sample(logits, row, length, self.rows.tokens)
        sampled = self._finish(drawn, logits, sampled_rows, lengths)
        # Last: the samples after draft tokens depend on those, which are replaced here.
        write_back(row, length, drawn.tokens, self.rows.tokens)
        in_order = _in_plan_order(sampled, step.order, plan)
        return GpuHandle(in_order, self.rows, prompts, pooled)

    def _forward(
        self, step: StepRows, selection: scores.LogitSelection
    ) -> tuple[Tensor, list[pooling.Pooled]]:
        """Run the model. Return the selected logits and the pooled states of complete prompts."""
        rows = step.rows
        counts = step.counts
        pools = None
        if self.rows.pooling:
            pools = pooling.select_pooled(
                rows.tolist(), step.positions, counts, self.rows, step.order
            )
        if pools is None:
            return self._logits(step, selection), []
        embeddings = self.rows.prompts.find_embeddings(rows, step.positions, counts)
        tokens = np.concatenate([selection.tokens, pools.tokens])
        made = self._step(rows, step.positions, counts, tokens, embeddings)
        logits, states = self.model.logits_and_states(made, self.cache, len(selection.tokens))
        return logits, pooling.pool_states(states.float(), pools, self.rows, self.model.score)

    def _logits(self, step: StepRows, selection: scores.LogitSelection) -> Tensor:
        """Compute the logits of a step, by a captured graph where one fits: [selected, vocab]."""
        rows = step.rows
        positions = step.positions
        counts = step.counts
        several = counts > 1
        unpacks = self._unpacks_long_prefix(positions[several], counts[several])
        size = None
        if not selection.prompts and not unpacks:
            size = self.mixed.captured_size(counts, len(selection.tokens))
        embeddings = self.rows.prompts.find_embeddings(rows, positions, counts)
        if size is not None and embeddings is None and not self._has_adapter(rows.tolist()):
            return self.mixed.replay(size, rows, positions, counts, selection.tokens)
        padded = self._pad_logit_tokens(selection.tokens)
        made = self._step(rows, positions, counts, padded, embeddings)
        return self.model(made, self.cache)[: len(selection.tokens)]

    def _step(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        logit_tokens: np.ndarray,
        embeddings: tuple[Tensor, Tensor] | None,
    ) -> Step:
        """Return the model's input for a step. Rows with one new token come first."""
        invariant = self.model.options.deterministic
        decodes = 0 if invariant else int((counts == 1).sum())
        several = slice(decodes, None)
        longest = int((positions + counts)[several].max(initial=0))
        large_tiles = not invariant and use_large_tiles(
            longest, self.model.dtype, self.model.spec.head_size, self.model.device
        )
        unpacked = self._unpacked_kv(rows[several], positions[several], counts[several])
        host_arrays = self._step_arrays(
            rows,
            positions,
            counts,
            logit_tokens,
            decodes,
            large_tiles=large_tiles,
            own_tables=unpacked is not None,
        )
        arrays = to_device_arrays(host_arrays, self.model.device)
        ids, slots = step_inputs(
            arrays.rows, arrays.positions, self.rows.tokens, self.rows.tables, self.block_tokens
        )
        attention = GpuAttention(
            self.rows.tables,
            self.block_tokens,
            self.resident_ctas,
            decodes,
            decode_plan(arrays) if decodes else None,
            prefill_plan(arrays, large_tiles) if decodes < len(rows) else None,
            unpacked,
            invariant,
        )
        return Step(
            token_ids=ids,
            positions=arrays.positions,
            slots=slots,
            attention=attention,
            samples=arrays.logit_tokens,
            adapters=self._step_adapters(rows, counts),
            logits=self._static_logits(len(logit_tokens)),
            embeddings=embeddings,
        )

    def _step_arrays(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        logit_tokens: np.ndarray,
        decodes: int,
        large_tiles: bool,
        own_tables: bool,
    ) -> StepArrays[np.ndarray]:
        """Return the arrays of a step, on the host.

        `decodes`: rows at the beginning that decode attention takes; `own_tables`: the other rows
        have block tables of their own, numbered from 0.
        """
        ends = np.cumsum(counts)
        offsets = ends - counts
        chunks = cut_chunks(
            rows[:decodes],
            (positions + counts)[:decodes],
            self.model.spec.kv_heads,
            self.resident_ctas,
        )
        several = slice(decodes, None)
        tables = np.arange(len(rows) - decodes) if own_tables else rows[several]
        tiles = cut_tiles(
            tables, positions[several], counts[several], offsets[several], large_tiles
        )
        return StepArrays(
            rows=np.repeat(rows, counts),
            positions=np.arange(ends[-1]) + np.repeat(positions - offsets, counts),
            lengths=EMPTY,
            logit_tokens=logit_tokens,
            chunks=chunks.ravel(),
            tile_token=tiles.token,
            tile_position=tiles.position,
            tile_queries=tiles.queries,
            tile_row=tiles.row,
            tile_cached=tiles.cached,
        )

    def _unpacks_long_prefix(self, positions: np.ndarray, counts: np.ndarray) -> bool:
        """Return whether rows with several new tokens gain more from unpacking their long prefix
        first, which no captured graph does.
        """
        return bool(positions.max(initial=0) >= LARGE_TILES_FROM) and self._unpacks(
            positions, counts
        )

    def _unpacks(self, positions: np.ndarray, counts: np.ndarray) -> bool:
        packed = self.cache.dtype == packed_cache.DTYPE
        return packed and unpacking_pays(
            positions, counts, self.block_tokens, 4 * self.model.spec.kv_size
        )

    def _unpacked_kv(
        self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> UnpackedKv | None:
        """Return space for the unpacked prefix of rows with several new tokens, where unpacking it
        before attention is faster.
        """
        spec = self.model.spec
        if not self._unpacks(positions, counts):
            return None
        where, tables = plan_unpacking(
            rows, positions, self.block_tokens, self.rows.tables.shape[1]
        )
        blocks = self.rows.tables.view(-1)[to_device(where, self.model.device)]
        # A power of two: each step of a long prompt has a longer prefix than the last one, whose
        # memory would otherwise be too small to be used again.
        shape = (2, spec.kv_heads, power_of_two(len(where)) * self.block_tokens, spec.head_size)
        try:
            keys, values = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        except torch.OutOfMemoryError:
            return None  # attention then unpacks it tile by tile
        tables_on_device = to_device(tables, self.model.device)
        return UnpackedKv(blocks, tables_on_device, keys, values, self.block_tokens)

    def _pad_logit_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Pad the tokens whose logits are computed to a number that was met at start.

        For each new number the library loads kernels, and the device waits meanwhile.
        """
        size = self.graphs.captured_size(len(tokens)) if len(tokens) else None
        return tokens if size is None else np.pad(tokens, (0, size - len(tokens)))

    def _static_logits(self, count: int) -> Tensor | None:
        """Return static memory for a step's logits, or None when there is too little.

        New memory would have another size in every step, and asking the driver for it takes time.
        """
        static = self.graphs.logits
        return static[:count] if static is not None and count <= len(static) else None

    def _has_adapter(self, rows: Iterable[int]) -> bool:
        return any(self.rows.pages[row] for row in rows)

    def _step_adapters(self, rows: np.ndarray, counts: np.ndarray) -> GpuStepAdapters | None:
        if self.adapters is None or self._row_pages is None or not self._has_adapter(rows.tolist()):
            return None
        starts, sizes, tile_rows = pack(list(cut_adapter_tiles(rows, counts)), self.model.device)
        return GpuStepAdapters(
            self.adapters,
            self._row_pages,
            Tiles(starts, sizes, tile_rows, TILE_TOKENS),
            batch_invariant=self.model.options.deterministic,
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

    def _finish(self, drawn: Drawn, logits: Tensor, rows: list[int], lengths: list[int]) -> Sampled:
        """Return what the rows of a step sampled: what the kernels drew, and the tokens of rows
        that the kernels do not serve. Those rows' logits [samples, vocab] are still the model's.
        """
        reporting = self.sampling.reporting
        log_probs = None if reporting.isdisjoint(rows) else drawn.log_probs
        external = self.sampling.external
        chosen = (
            []
            if external.isdisjoint(rows)
            else [index for index, row in enumerate(rows) if row in external]
        )
        likeliest = self.sampling.find_likeliest(drawn, rows)
        if not chosen:
            return Sampled(drawn.tokens, drawn.best, log_probs, [], likeliest=likeliest)
        some_rows = [rows[index] for index in chosen]
        some_lengths = [lengths[index] for index in chosen]
        where = list_to_device(chosen, logits.device)
        deterministic = self.model.options.deterministic
        sampled = sampler.sample(logits[where], some_rows, some_lengths, self.rows, deterministic)
        row, length = pack([np.array(some_rows), np.array(some_lengths)], self.model.device)
        write_back(row, length, sampled.tokens, self.rows.tokens)
        drawn.tokens[where] = sampled.tokens
        drawn.best[where] = sampled.best.float()
        if sampled.log_probs is not None:
            drawn.log_probs[where] = sampled.log_probs
            log_probs = drawn.log_probs
        return Sampled(
            drawn.tokens,
            drawn.best,
            log_probs,
            top=[(chosen[index], ids, values) for index, ids, values in sampled.top],
            raw=[(chosen[index], values) for index, values in sampled.raw],
            likeliest=likeliest,
        )


def _in_plan_order(sampled: Sampled, order: list[int], plan: StepPlan) -> Sampled:
    """Sort results, which are in the order of the step's rows, by plan entry."""
    computed: list[tuple[int, int]] = []  # (plan entry, draft token) of each result
    for entry in order:
        if plan.samples[entry]:
            computed += [(entry, draft) for draft in range(1 + plan.drafts[entry])]
    if computed == sorted(computed):
        return sampled
    place = sorted(range(len(computed)), key=computed.__getitem__)
    new_index = {computed_at: plan_at for plan_at, computed_at in enumerate(place)}
    where = list_to_device(place, sampled.tokens.device)
    likeliest = sampled.likeliest
    if likeliest is not None:
        moved = {new_index[index]: found for index, found in likeliest.samples.items()}
        likeliest = likeliest._replace(samples=moved)
    return Sampled(
        tokens=sampled.tokens[where],
        best=sampled.best[where],
        log_probs=None if sampled.log_probs is None else sampled.log_probs[where],
        top=[(new_index[index], tokens, values) for index, tokens, values in sampled.top],
        raw=[(new_index[index], logits) for index, logits in sampled.raw],
        likeliest=likeliest,
    )
