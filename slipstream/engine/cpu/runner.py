"""Carries out plans on a CPU with compiled code: one call for a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from slipstream.engine import pooling, sampler, scores
from slipstream.engine.cpu.buffers import Buffers, Cache
from slipstream.engine.cpu.candidates import CandidateFinder
from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.cpu.program import ProgramWriter
from slipstream.engine.cpu.step_parts import Segment, StepParts
from slipstream.engine.handle import Handle
from slipstream.engine.plan import StepPlan, sampling_places
from slipstream.engine.rows import Rows
from slipstream.kernels.attention_rule import cache_shape
from slipstream.kernels.cpu.layout import CHUNK, PART_FLOATS, TILE_LANES
from slipstream.kernels.cpu.memory import aligned, sparse
from slipstream.kernels.cpu.objects import Code
from slipstream.kernels.cpu.operations import Format
from slipstream.kernels.cpu.records import Context
from slipstream.kernels.cpu.team import Team

if TYPE_CHECKING:  # torch is loaded with the first adapter, or for a host cache
    from slipstream.engine.cache.host_cache import HostCache
    from slipstream.kernels.adapters import AdapterPages, CpuStepAdapters

_FIRST_TOKENS = 64  # tokens of a step that there is memory for at first
# From this many tokens of a row on, attention computes tiles of queries.
_TILE_FROM_TOKENS = 16
# A row's positions are divided among threads if there are fewer units than this for each of them.
_UNITS_A_THREAD = 4


class CpuRunner:
    def __init__(
        self,
        model: CpuModel,
        code: Code,
        threads: int,
        total_blocks: int,
        block_tokens: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.rows = Rows(max_rows, max_tokens + 1, -(-max_tokens // block_tokens))
        slots = (total_blocks + 1) * block_tokens  # with the null block
        self.cache = new_cache(model, slots)
        self.host: HostCache | None = None  # host memory for evicted blocks
        self.adapters: AdapterPages | None = None  # None until the first adapter is loaded
        self._steps = Steps(model, code, threads, self.cache)
        self._find_candidates = CandidateFinder(self._steps.team)

    def launch(self, plan: StepPlan) -> Handle:
        if self.host is not None:
            self.host.move(plan)
        copy_blocks(self.cache, plan.copies, self.block_tokens)
        self.rows.apply(plan)
        positions = np.array(plan.positions)
        counts = np.array(plan.counts)
        entries = range(len(plan.rows))
        selection = scores.select_logits(
            plan.rows,
            positions,
            counts,
            np.array(plan.samples),
            self.rows,
            entries,
            plan.drafts,
        )
        pools = None
        if self.rows.pooling:
            pools = pooling.select_pooled(plan.rows, positions, counts, self.rows, entries)
        wanted = selection.tokens
        if pools is not None:
            wanted = np.concatenate([wanted, pools.tokens])
        self._steps.reserve(max(int(counts.sum()), len(wanted)))
        self._steps.fill(plan, positions, counts, self.rows, self.block_tokens)
        self._steps.run(wanted, len(selection.tokens), self._step_adapters(plan))
        pooled: list[pooling.Pooled] = []
        if pools is not None:
            states = self._steps.states(len(selection.tokens), len(pools.tokens))
            pooled = pooling.pool_states(states, pools, self.rows, self.model.score)
        return self._sample(plan, selection, pooled)

    def _sample(
        self, plan: StepPlan, selection: scores.LogitSelection, pooled: list[pooling.Pooled]
    ) -> Handle:
        count = len(selection.tokens)
        rows, lengths = sampling_places(plan, range(len(plan.rows)))
        chosen = slice(None) if selection.samples is None else selection.samples
        best = self._steps.likeliest(count)
        if not selection.prompts and rows and sampler.all_plain(rows, self.rows):
            sampled = sampler.Sampled(best.tokens[chosen], best.logits[chosen], None, [])
            self.rows.tokens[rows, lengths] = sampled.tokens  # the next step reads them
            return Handle(sampled, self.rows, [], pooled)
        logits = self._steps.logits(count)
        prompts = scores.prompt_logits(logits, selection, self.rows)
        if selection.samples is not None:
            logits = logits[selection.samples]
        if not rows:
            return Handle(None, self.rows, prompts, pooled)
        # numpy finds the rows that are not numbers
        likeliest = best.tokens[chosen] if np.isfinite(best.logits).all() else None
        sampled = sampler.sample(logits, rows, lengths, self.rows, self._find_candidates, likeliest)
        self.rows.tokens[rows, lengths] = sampled.tokens
        return Handle(sampled, self.rows, prompts, pooled)

    def _step_adapters(self, plan: StepPlan) -> CpuStepAdapters | None:
        if self.adapters is None:
            return None
        pages = [self.rows.pages[row] for row in plan.rows]
        return self.adapters.on_cpu(pages, plan.counts, self.model.options.deterministic)

    def close(self) -> None:
        """End the threads."""
        self._steps.team.close()


def new_cache(model: CpuModel, slots: int) -> np.ndarray:
    """Return an empty cache for the keys and values of all layers, in attention's layout.

    bfloat16 is stored as uint16.
    """
    spec = model.spec
    shape = cache_shape(spec.layers, slots, spec.kv_heads, spec.head_size)
    dtype = np.dtype(np.float32 if model.format is Format.F32 else np.uint16)
    return sparse(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def copy_blocks(cache: np.ndarray, copies: list[tuple[int, int]], block_tokens: int) -> None:
    """Copy blocks (source, target). No block is both a source and a target.

    cache: [layers, 2, kv_heads, slots, head_size]
    """
    if copies:
        blocks = cache.reshape(*cache.shape[:3], -1, block_tokens * cache.shape[4])
        sources, targets = (list(numbers) for numbers in zip(*copies, strict=True))
        blocks[:, :, :, targets] = blocks[:, :, :, sources]


class LikeliestTokens:
    """The likeliest token of each row, and its logit."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray) -> None:
        """tokens, logits: of each part of the vocabulary, [rows, parts]"""
        part = logits.argmax(axis=1)
        rows = np.arange(len(part))
        self.tokens = tokens[rows, part]
        self.logits = logits[rows, part]


class Steps:
    """Computes steps: keeps the programs, their memory and the context of a step."""

    def __init__(self, model: CpuModel, code: Code, threads: int, cache: np.ndarray) -> None:
        self._model = model
        self._cache = Cache(int(cache.ctypes.data), *cache.strides[:3])
        widest = max(model.widths)
        self.team = Team(code, threads, 4 * widest + 256)
        self._context = aligned(8 * Context.SIZE).view(np.int64)
        # what the context points to: kept until the next step
        self._arrays: dict[Context, np.ndarray] = {}
        self._logits = aligned(0).view(np.float32)
        self._parts = aligned(0)
        self._tokens = 0
        self._embeddings: np.ndarray | None = None
        self._allocate(_FIRST_TOKENS)

    def reserve(self, tokens: int) -> None:
        """Make room for a step of this many tokens, or of fewer tokens with as many final states.

        A token has two states if it is both sampled and pooled.
        """
        if tokens > self._buffers.tokens:
            self._allocate(max(tokens, min(2 * self._buffers.tokens, 512)))

    def _allocate(self, tokens: int) -> None:
        self._buffers = Buffers(self._model, tokens, self.team.size)
        self._programs: dict[bool, list[Segment]] = {}

    def _program(self, adapted: bool) -> list[Segment]:
        if adapted not in self._programs:
            writer = ProgramWriter(self._model, self._buffers, self._cache, adapted)
            self._programs[adapted] = writer.write()
        return self._programs[adapted]

    def _set(self, field: Context, array: np.ndarray) -> None:
        """Let a field of the context point to an array."""
        self._arrays[field] = array
        self._context[field] = array.ctypes.data

    def fill(
        self,
        plan: StepPlan,
        positions: np.ndarray,
        counts: np.ndarray,
        rows: Rows,
        block_tokens: int,
    ) -> None:
        """Write the tokens of a step to the context."""
        row_of_entry = np.array(plan.rows)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        tables = rows.tables
        row_of_token = np.repeat(row_of_entry, counts)
        position_of_token = np.arange(total) + np.repeat(positions - (ends - counts), counts)
        blocks = tables[row_of_token, position_of_token // block_tokens].astype(np.int64)
        token_ids = rows.tokens[row_of_token, position_of_token]
        self._context[Context.TOKENS] = self._tokens = total
        self._context[Context.BLOCK_TOKENS] = block_tokens
        self._set(Context.TOKEN_IDS, token_ids)
        self._set(Context.POSITIONS, position_of_token)
        self._set(Context.SLOTS, blocks * block_tokens + position_of_token % block_tokens)
        self._set_embeddings(rows.prompts.find_embeddings(plan.rows, plan.positions, plan.counts))
        addresses = tables.ctypes.data + row_of_entry * tables.strides[0]
        self._plan_attention(positions, counts, ends - counts, addresses, position_of_token)

    def _set_embeddings(self, given: tuple[np.ndarray, np.ndarray] | None) -> None:
        self._context[Context.EMBEDDINGS] = 0
        if given is None:
            return
        tokens, values = given
        self._embeddings = np.ascontiguousarray(values)
        addresses = np.zeros(self._tokens, dtype=np.int64)
        row_bytes = self._embeddings.strides[0]
        addresses[tokens] = self._embeddings.ctypes.data + np.arange(len(tokens)) * row_bytes
        self._set(Context.EMBEDDINGS, addresses)

    def _plan_attention(
        self,
        positions: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        tables: np.ndarray,
        position_of_token: np.ndarray,
    ) -> None:
        """List the work of attention. starts: of each entry's tokens; tables: addresses."""
        group = self._model.queries_of_group
        tiled = np.zeros(len(counts), dtype=bool)
        # A tile computes scores in another order than a single token. In float32, and if asked for,
        # results must not depend on how a prompt was cut.
        if self._model.format is Format.BF16 and not self._model.options.deterministic:
            tiled = (counts >= _TILE_FROM_TOKENS) & (group <= TILE_LANES)
        if not tiled.any():
            self._list_singles(position_of_token, np.repeat(tables, counts))
            return
        each = np.where(tiled, TILE_LANES // min(group, TILE_LANES), 1)
        pieces = -(-counts // each)
        entry = np.repeat(np.arange(len(counts)), pieces)
        before = np.cumsum(pieces) - pieces
        offset = (np.arange(len(entry)) - before[entry]) * each[entry]
        token = starts[entry] + offset
        position = positions[entry] + offset
        count = np.minimum(counts[entry] - offset, each[entry])
        is_tile = tiled[entry]
        tiles = np.stack([token, count, position, tables[entry]], axis=1)[is_tile]
        singles = np.stack([token, position + 1, tables[entry]], axis=1)[~is_tile]
        self._set(Context.TILE_LIST, np.ascontiguousarray(tiles[::-1]))
        self._set(Context.SINGLE_LIST, np.ascontiguousarray(singles))
        self._context[Context.TILES] = len(tiles)
        self._context[Context.SINGLES] = len(singles)
        self._context[Context.SPLIT] = 0

    def _list_singles(self, positions: np.ndarray, tables: np.ndarray) -> None:
        """List tokens that are all computed one by one. positions, tables: of each token"""
        count = len(positions)
        singles = np.empty((count, 3), dtype=np.int64)
        singles[:, 0] = np.arange(count)
        singles[:, 1] = positions + 1
        singles[:, 2] = tables
        self._set(Context.SINGLE_LIST, singles)
        self._context[Context.TILES] = 0
        self._context[Context.SINGLES] = count
        self._context[Context.SPLIT] = 0
        if count * self._model.spec.kv_heads < _UNITS_A_THREAD * self.team.size:
            self._split(int(positions.max()) + 1, count)

    def _split(self, longest: int, tokens: int) -> None:
        """Divide the positions of rows of one token among the threads."""
        spec = self._model.spec
        chunks = -(-longest // CHUNK)
        size = tokens * chunks * spec.heads * (spec.head_size + PART_FLOATS) * 4
        if size > self._parts.nbytes:
            self._parts = aligned(2 * size)
        self._context[Context.SPLIT] = chunks
        self._context[Context.PARTS] = self._parts.ctypes.data

    def run(self, wanted: np.ndarray, logits: int, adapters: CpuStepAdapters | None) -> None:
        """Compute the step. wanted: tokens whose final states are computed; logits: how many of
        them, from the first on, have logits
        """
        width = self._model.head.outputs
        if logits * width > self._logits.size:
            self._logits = aligned(logits * width * 4).view(np.float32)
        self._set(Context.SAMPLE_TOKENS, np.ascontiguousarray(wanted, dtype=np.int64))
        self._context[Context.SAMPLES] = len(wanted)
        self._context[Context.LOGITS] = logits
        self._context[Context.LOGIT_TARGET] = self._logits.ctypes.data
        self._context[Context.PRIVATE] = int(self._tokens == 1)
        parts = StepParts(self._tokens, len(wanted), adapters)
        address = int(self._context.ctypes.data)
        for segment in self._program(adapters is not None):
            if isinstance(segment, np.ndarray):
                self._context[Context.PROGRAM] = segment.ctypes.data
                self._context[Context.OPERATIONS] = len(segment)
                self.team.run(address)
            else:
                segment(parts)

    def logits(self, rows: int) -> np.ndarray:
        """Return the logits of a step, float32 [rows, vocab]. The next step overwrites them."""
        width = self._model.head.outputs
        found = self._logits[: rows * width].reshape(rows, width)
        found = found[:, : len(self._model.vocabulary)]
        if self._model.ranks.size == 1:
            return found
        from slipstream.engine.cpu.rank_parts import join_logits

        return join_logits(self._model.ranks, found, self._model.spec)

    def states(self, first: int, count: int) -> np.ndarray:
        """Return final states of a step, from the sample `first` on: float32 [count, hidden]."""
        states = self._buffers.float_states[first : first + count]
        return states[:, : self._model.spec.embedding_width].copy()

    def likeliest(self, rows: int) -> LikeliestTokens:
        """Return the likeliest token of the first rows with logits."""
        found = LikeliestTokens(self._buffers.best_tokens[:rows], self._buffers.best_logits[:rows])
        if self._model.ranks.size > 1:
            from slipstream.engine.cpu.rank_parts import choose_best

            first = self._model.vocabulary.start
            found.logits, found.tokens = choose_best(
                self._model.ranks, found.logits, found.tokens + first
            )
        return found
