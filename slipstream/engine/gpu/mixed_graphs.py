"""Steps with few prompt tokens as CUDA graphs: such a step takes the GPU less time than its launch
takes the host. Switch: `KernelOptions.mixed_graphs`.

A captured step has space for rows with one new token, which come first, and for the tokens of rows
with several. Unused decode slots point at the padding row. Unused prompt tokens form one dummy row,
so that everything a kernel may read has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.gpu.graphs import GraphContext, record
from slipstream.engine.gpu.step_arrays import (
    EMPTY,
    StaticStepArrays,
    StepArrays,
    decode_plan,
    prefill_plan,
)
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_chunks import CHUNK_FIELDS, ResidentCtas, cut_chunks, max_chunks
from slipstream.kernels.gpu.prefill_tiles import QUERY_TILE, cut_tiles
from slipstream.kernels.gpu.step import step_inputs
from slipstream.model.transformer import Step

# Steps of up to this many tokens take as long as reading the weights does, so padding is free.
_FREE_TOKENS = 256
# In longer steps than the launch, the GPU waits for the host for about this part of the launch.
_PADDING_PART = 16


class MixedSize(NamedTuple):
    """The size of a captured step."""

    decodes: int  # rows with one new token
    tokens: int  # tokens of rows with several
    prompts: int = 16  # rows with several

    @property
    def total(self) -> int:
        return self.decodes + self.tokens

    @property
    def logits(self) -> int:
        """The number of tokens whose logits are computed."""
        return self.decodes + self.prompts


SIZES = [
    *(MixedSize(16, tokens) for tokens in (64, 128, 256, 512)),
    *(MixedSize(128, tokens) for tokens in (64, 128, 256, 512)),
]
# for models whose steps take the GPU less time than the host
_LARGE_SIZES = [
    *(MixedSize(128, tokens, 32) for tokens in (1024, 2048)),
    *(MixedSize(512, tokens, 32) for tokens in (512, 1024, 2048)),
    *(MixedSize(decodes, 4096, 64) for decodes in (128, 1024)),
    # steps with the default budget of 8192 tokens: the more decodes, the fewer prompt tokens
    MixedSize(128, 8192, 128),
    MixedSize(512, 8064, 128),
    MixedSize(1024, 7680, 128),
]


def sizes_to_capture(fast_tokens: int, step_tokens: int, rows: int) -> list[MixedSize]:
    """Return the sizes to capture.

    fast_tokens: tokens of a step that the GPU computes in the time of its launch
    step_tokens: budget of a step; rows: most rows of a step
    """
    most = fast_tokens + fast_tokens // _PADDING_PART
    return SIZES + [
        size
        for size in _LARGE_SIZES
        if size.total <= most and size.tokens <= step_tokens and size.decodes <= max(rows, 128)
    ]


class MixedBuffers:
    """Static input arrays of a step: up to `decodes` rows with one new token, and `tokens` tokens
    of other rows.
    """

    def __init__(
        self,
        size: MixedSize,
        kv_heads: int,
        resident_ctas: ResidentCtas,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self.decodes, self.tokens, prompts = size
        self.kv_heads = kv_heads
        self.resident_ctas = resident_ctas
        self.padding_row = padding_row
        tiles = self.tokens // QUERY_TILE + prompts + 1
        sizes = StepArrays(
            rows=size.total,
            positions=size.total,
            lengths=0,
            logit_tokens=size.logits,
            chunks=max_chunks(self.decodes, kv_heads, resident_ctas) * CHUNK_FIELDS,
            tile_token=tiles,
            tile_position=tiles,
            tile_queries=tiles,
            tile_row=tiles,
            tile_cached=tiles,
        )
        self._static = StaticStepArrays(sizes, device)
        self.rows = self._static.arrays.rows
        self.positions = self._static.arrays.positions
        self.logit_tokens = self._static.arrays.logit_tokens
        self.decode = decode_plan(self._static.arrays)
        self.prefill = prefill_plan(self._static.arrays)

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray, logit_tokens: np.ndarray
    ) -> None:
        """Write a step of these rows, those with one new token first.

        `logit_tokens`: the tokens of the step whose logits are computed.
        """
        decodes = int((counts == 1).sum())
        unused_decodes = self.decodes - decodes
        unused_tokens = self.tokens - int(counts[decodes:].sum())
        decode_rows = np.append(rows[:decodes], np.full(unused_decodes, self.padding_row))
        decode_positions = np.append(positions[:decodes], np.zeros(unused_decodes, dtype=np.int64))
        rows = np.append(rows[decodes:], self.padding_row)
        positions = np.append(positions[decodes:], 0)
        counts = np.append(counts[decodes:], unused_tokens)
        offsets = self.decodes + np.cumsum(counts) - counts
        place = np.arange(self.decodes, self.decodes + self.tokens)
        prefill_positions = place + np.repeat(positions - offsets, counts)
        # The padding row has no more than one block.
        prefill_positions[self.tokens - unused_tokens :] = 0
        chunks = cut_chunks(decode_rows, decode_positions + 1, self.kv_heads, self.resident_ctas)
        tiles = cut_tiles(rows, positions, counts, offsets)
        self._static.fill(
            StepArrays(
                rows=np.append(decode_rows, np.repeat(rows, counts)),
                positions=np.append(decode_positions, prefill_positions),
                lengths=EMPTY,
                logit_tokens=np.where(
                    logit_tokens < decodes, logit_tokens, logit_tokens + unused_decodes
                ),
                chunks=chunks.ravel(),
                tile_token=tiles.token,
                tile_position=tiles.position,
                tile_queries=tiles.queries,
                tile_row=tiles.row,
                tile_cached=tiles.cached,
            )
        )


class CapturedMixed(NamedTuple):
    graph: torch.cuda.CUDAGraph
    buffers: MixedBuffers
    logits: Tensor  # [logit_tokens, vocab]


class MixedGraphs:
    def __init__(self, context: GraphContext) -> None:
        self._context = context
        self._graphs: dict[MixedSize, CapturedMixed] = {}
        # tokens of a step that the GPU computes in the time of its launch
        self.fast_tokens = max(size.total for size in SIZES)

    def capture(
        self,
        sizes: Sequence[MixedSize],
        pool: Any,
        logits: Tensor,
        progress: Callable[[int], None],
    ) -> None:
        """Capture steps. pool, logits: memory of other graphs, which never run at the same time"""
        for done, size in enumerate(reversed(sizes)):
            self._graphs[size] = self._capture(size, pool, logits[: size.logits])
            progress(done + 1)

    def run_all(self) -> None:
        """Run the steps that are captured for every model."""
        for size in SIZES:
            shape = (size.logits, self._context.model.spec.vocab_size)
            logits = torch.empty(shape, dtype=torch.float32, device=self._context.device)
            self._run(self._buffers(size), logits)

    def _buffers(self, size: MixedSize) -> MixedBuffers:
        context = self._context
        buffers = MixedBuffers(
            size,
            context.model.spec.kv_heads,
            context.resident_ctas,
            context.rows.padding_row,
            context.device,
        )
        nothing = np.zeros(0, dtype=np.int64)
        buffers.fill(nothing, nothing, nothing, nothing)
        return buffers

    def _capture(self, size: MixedSize, pool: Any, logits: Tensor) -> CapturedMixed:
        buffers = self._buffers(size)
        graph, result = record(lambda: self._run(buffers, logits), size.total, pool)
        return CapturedMixed(graph, buffers, result)

    def captured_size(self, counts: np.ndarray, logits: int) -> MixedSize | None:
        """Return the smallest captured step for rows with these token counts; None if there is none
        or padding to its size takes too long.

        `logits`: the number of tokens whose logits are computed.
        """
        decodes = int((counts == 1).sum())
        tokens = int(counts.sum()) - decodes
        prompts = len(counts) - decodes
        fitting = (
            size
            for size in self._graphs
            if size.decodes >= decodes
            and size.tokens >= tokens
            and size.prompts >= prompts
            and size.logits >= logits
        )
        found = min(fitting, key=lambda size: size.total, default=None)
        if found is None or found.total <= self.fast_tokens:
            return found
        padding = found.total - max(decodes + tokens, _FREE_TOKENS)
        return found if padding <= self.fast_tokens // _PADDING_PART else None

    def replay(
        self,
        size: MixedSize,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        logit_tokens: np.ndarray,
    ) -> Tensor:
        """Run a step and return its logits [logit_tokens, vocab], in static memory."""
        captured = self._graphs[size]
        captured.buffers.fill(rows, positions, counts, logit_tokens)
        captured.graph.replay()
        return captured.logits[: len(logit_tokens)]

    def _run(self, buffers: MixedBuffers, logits: Tensor) -> Tensor:
        context = self._context
        rows = context.rows
        ids, slots = step_inputs(
            buffers.rows, buffers.positions, rows.tokens, rows.tables, context.block_tokens
        )
        attention = GpuAttention(
            rows.tables,
            context.block_tokens,
            context.resident_ctas,
            buffers.decodes,
            buffers.decode,
            buffers.prefill,
        )
        step = Step(
            token_ids=ids,
            positions=buffers.positions,
            slots=slots,
            attention=attention,
            samples=buffers.logit_tokens,
            adapters=None,
            logits=logits,
        )
        return context.model(step, context.cache)
