"""Decode steps as CUDA graphs: from the rows to the sampled tokens without work on the host.

Graphs are captured once for a series of batch sizes. A step with fewer rows than its graph is
padded with the padding row, which reads and writes the null block. A replay uses static buffers
only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.gpu.sampling_rows import SamplingRows
from slipstream.engine.gpu.step_arrays import EMPTY, StaticStepArrays, StepArrays, decode_plan
from slipstream.engine.rows import Rows
from slipstream.kernels.adapters import AdapterPages
from slipstream.kernels.gpu.adapters import GpuStepAdapters, decode_tiles
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_chunks import CHUNK_FIELDS, ResidentCtas, cut_chunks, max_chunks
from slipstream.kernels.gpu.linear import fastest_blas_library
from slipstream.kernels.gpu.prefill_tiles import single_tokens
from slipstream.kernels.gpu.sampling.table import Drawn
from slipstream.kernels.gpu.step import step_inputs, write_back
from slipstream.model.transformer import Step, Transformer


def batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to capture, up to `largest`.

    They are dense where steps are short, and sparse where a few padding rows cost little.
    """
    sizes = [
        1,
        2,
        4,
        *range(8, 65, 8),
        *range(80, 257, 16),
        *range(288, 513, 32),
        *range(576, 4097, 64),
    ]
    return [size for size in sizes if size < largest] + [largest]


class DecodeBuffers:
    """Static input arrays of a decode step of up to `size` rows."""

    def __init__(
        self,
        size: int,
        kv_heads: int,
        resident_ctas: ResidentCtas,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self.size = size
        self.kv_heads = kv_heads
        self.resident_ctas = resident_ctas
        self.padding_row = padding_row
        sizes = StepArrays(
            rows=size,
            positions=size,
            lengths=size,
            logit_tokens=0,
            chunks=max_chunks(size, kv_heads, resident_ctas) * CHUNK_FIELDS,
            tile_token=0,
            tile_position=0,
            tile_queries=0,
            tile_row=0,
            tile_cached=0,
        )
        self._static = StaticStepArrays(sizes, device)
        self.rows = self._static.arrays.rows
        self.positions = self._static.arrays.positions
        self.lengths = self._static.arrays.lengths
        self.plan = decode_plan(self._static.arrays)

    def fill(self, rows: list[int], positions: list[int]) -> None:
        """Write the rows of a step and the positions that they compute; pad the rest."""
        padding = self.size - len(rows)
        lengths = np.array(positions + [0] * padding) + 1
        padded = np.array(rows + [self.padding_row] * padding)
        chunks = cut_chunks(padded, lengths, self.kv_heads, self.resident_ctas)
        self._static.fill(
            StepArrays(
                rows=padded,
                positions=lengths - 1,
                lengths=lengths,
                logit_tokens=EMPTY,
                chunks=chunks.ravel(),
                tile_token=EMPTY,
                tile_position=EMPTY,
                tile_queries=EMPTY,
                tile_row=EMPTY,
                tile_cached=EMPTY,
            )
        )


class DecodeOutputs(NamedTuple):
    """The outputs of a decode step, in static memory."""

    logits: Tensor  # [rows, vocab]
    drawn: Drawn  # the tokens of the rows, which are already written to them


class CapturedDecode(NamedTuple):
    """A captured graph and every buffer it uses. They must stay alive: a replay does not check."""

    graph: torch.cuda.CUDAGraph
    buffers: DecodeBuffers
    adapters: GpuStepAdapters | None
    outputs: DecodeOutputs


def record(run: Callable[[], Any], tokens: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what `run` launches, a step of `tokens` tokens, into the memory of `pool`.

    Returns the graph and the result of `run`.
    """
    with fastest_blas_library(tokens):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and libraries choose outside the capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that load adapters may still ask the driver for memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
    return graph, result


@dataclass(frozen=True, slots=True)
class GraphContext:
    """The model and the memory that captured steps use. It lives as long as the graphs."""

    model: Transformer
    cache: Tensor
    rows: Rows
    block_tokens: int
    resident_ctas: ResidentCtas

    @property
    def device(self) -> torch.device:
        device: torch.device = self.rows.tokens.device
        return device


class DecodeGraphs:
    def __init__(self, context: GraphContext, sampling: SamplingRows) -> None:
        self._context = context
        self._sampling = sampling
        self._graphs: dict[int, CapturedDecode] = {}
        # graphs with adapters, captured when first needed
        self._adapter_graphs: dict[int, CapturedDecode] = {}
        self.pool: Any = None  # torch's handle to the memory that the graphs share
        # [rows, vocab]: the output of every graph
        self.logits: Tensor | None = None

    def capture(self, largest: int, progress: Callable[[int], None], logit_rows: int = 0) -> None:
        """Capture steps of up to `largest` rows. logit_rows: rows of logits that others need"""
        shape = (max(largest, logit_rows), self._context.model.spec.vocab_size)
        self.logits = torch.empty(shape, dtype=torch.float32, device=self._context.device)
        # The largest comes first: the others fit into its memory.
        for done, size in enumerate(reversed(batch_sizes(largest))):
            self._graphs[size] = self._capture(size)
            progress(done + 1)

    def run_all(self, largest: int) -> None:
        """Run the steps that `capture` captures."""
        for size in batch_sizes(largest):
            self._run(self._buffers(size), None)

    def captured_size(self, rows: int) -> int | None:
        """Return the smallest captured batch size for this many rows, or None."""
        return min((size for size in self._graphs if size >= rows), default=None)

    def replay(
        self,
        rows: list[int],
        positions: list[int],
        adapters: tuple[AdapterPages, Tensor] | None = None,
    ) -> DecodeOutputs:
        """Run a decode step. The drawn tokens are already written to the rows.

        `adapters`: where a row has one, the pages and the table of each row's pages.
        """
        size = self.captured_size(len(rows))
        assert size is not None
        if adapters is not None and size not in self._adapter_graphs:
            self._adapter_graphs[size] = self._capture(size, adapters)
        captured = (self._graphs if adapters is None else self._adapter_graphs)[size]
        captured.buffers.fill(rows, positions)
        captured.graph.replay()
        count = len(rows)
        logits, drawn = captured.outputs
        return DecodeOutputs(logits[:count], Drawn(*(values[:count] for values in drawn)))

    def _capture(
        self, size: int, adapters: tuple[AdapterPages, Tensor] | None = None
    ) -> CapturedDecode:
        buffers = self._buffers(size)
        added = None if adapters is None else GpuStepAdapters(*adapters, decode_tiles(buffers.rows))
        graph, outputs = record(lambda: self._run(buffers, added), size, self.pool)
        self.pool = self.pool or graph.pool()
        return CapturedDecode(graph, buffers, added, outputs)

    def _buffers(self, size: int) -> DecodeBuffers:
        context = self._context
        buffers = DecodeBuffers(
            size,
            context.model.spec.kv_heads,
            context.resident_ctas,
            context.rows.padding_row,
            context.device,
        )
        buffers.fill([], [])
        return buffers

    def _run(self, buffers: DecodeBuffers, adapters: GpuStepAdapters | None) -> DecodeOutputs:
        context = self._context
        rows = context.rows
        ids, slots = step_inputs(
            buffers.rows, buffers.positions, rows.tokens, rows.tables, context.block_tokens
        )
        invariant = context.model.options.deterministic
        attention = GpuAttention(
            rows.tables,
            context.block_tokens,
            context.resident_ctas,
            buffers.size,
            None if invariant else buffers.plan,
            single_tokens(buffers.rows, buffers.positions) if invariant else None,
            batch_invariant=invariant,
        )
        step = Step(
            token_ids=ids,
            positions=buffers.positions,
            slots=slots,
            attention=attention,
            samples=None,
            adapters=adapters,
            logits=None if self.logits is None else self.logits[: buffers.size],
        )
        logits = context.model(step, context.cache)
        logits = logits.float()  # no copy of float32
        drawn = self._sampling.sample(logits, buffers.rows, buffers.lengths, rows.tokens)
        write_back(buffers.rows, buffers.lengths, drawn.tokens, rows.tokens)
        return DecodeOutputs(logits, drawn)
