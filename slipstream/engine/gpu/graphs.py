"""Decode steps as CUDA graphs: from the rows to the sampled tokens without a word from the host.

A ladder of batch sizes is captured once. A step of fewer rows than its rung is padded with rows
that nobody owns: they read the null block and write to it. A replay touches static buffers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.rows import Rows
from slipstream.engine.transfer import to_device
from slipstream.kernels.adapters import AdapterPages
from slipstream.kernels.gpu.adapters import GpuStepAdapters, decode_tiles
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_chunks import (
    CHUNK_FIELDS,
    DecodePlan,
    ResidentCtas,
    cut_chunks,
    max_chunks,
)
from slipstream.kernels.gpu.linear import fastest_blas_library
from slipstream.kernels.gpu.step import likeliest, step_inputs, write_back
from slipstream.model.transformer import Step, Transformer


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: dense where steps are short, sparse where a few rows more cost
    little.
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


def aligned(count: int) -> int:
    """Room for `count` numbers of 4 bytes that ends where 16 bytes do: kernels are compiled anew
    for arrays that begin elsewhere.
    """
    return -(-count // 4) * 4


class Numbers:
    """Arrays of int32 with fixed room each, in one piece of device memory that one copy fills."""

    def __init__(self, rooms: list[int], device: torch.device) -> None:
        self._rooms = rooms
        self._starts = np.cumsum([0] + [aligned(room) for room in rooms])
        self.memory = torch.zeros(int(self._starts[-1]), dtype=torch.int32, device=device)
        self.arrays = [
            self.memory[start : start + room]
            for start, room in zip(self._starts, rooms, strict=False)
        ]

    def fill(self, values: list[np.ndarray]) -> None:
        """Behind values that are fewer than there is room for come zeros."""
        staged = np.zeros(self._starts[-1], dtype=np.int32)
        for start, room, array in zip(self._starts, self._rooms, values, strict=False):
            assert len(array) <= room, f"{len(array)} numbers for a room of {room}"
            staged[start : start + len(array)] = array
        self.memory.copy_(to_device(staged, self.memory.device), non_blocking=True)


class DecodeBuffers:
    """The numbers of a decode step of up to `size` rows."""

    def __init__(
        self,
        size: int,
        kv_heads: int,
        resident_ctas: ResidentCtas,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self.size, self.kv_heads, self.resident_ctas, self.padding_row = (
            size,
            kv_heads,
            resident_ctas,
            padding_row,
        )
        chunks = max_chunks(size, kv_heads, resident_ctas)
        self._numbers = Numbers([size, size, size, chunks * CHUNK_FIELDS], device)
        self.rows, self.positions, self.lengths, cut = self._numbers.arrays
        self.plan = DecodePlan(cut.view(-1, CHUNK_FIELDS))

    def fill(self, rows: list[int], positions: list[int]) -> None:
        """Rows of the step and the positions they compute; the rest is padding."""
        padding = self.size - len(rows)
        lengths = np.array(positions + [0] * padding) + 1
        padded = np.array(rows + [self.padding_row] * padding)
        chunks = cut_chunks(padded, lengths, self.kv_heads, self.resident_ctas)
        self._numbers.fill([padded, lengths - 1, lengths, chunks.ravel()])


class Captured(NamedTuple):
    """A graph and all it reads and writes that nobody else keeps: a replay does not ask whether
    memory is still its.
    """

    graph: torch.cuda.CUDAGraph
    buffers: DecodeBuffers
    adapters: GpuStepAdapters | None
    logits: Tensor
    best: Tensor
    tokens: Tensor


def record(run: Callable[[], Any], tokens: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what `run` launches, a step of `tokens`, into the memory of `pool` → the graph, and
    what `run` gave.
    """
    with fastest_blas_library(tokens):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and libraries choose outside the capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which load adapters, may go on asking the driver for memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
    return graph, result


class DecodeGraphs:
    def __init__(
        self,
        model: Transformer,
        cache: Tensor,
        rows: Rows,
        block_tokens: int,
        resident_ctas: ResidentCtas,
    ) -> None:
        self.model, self.cache, self.rows = model, cache, rows
        self.block_tokens, self.resident_ctas = block_tokens, resident_ctas
        self._graphs: dict[int, Captured] = {}
        self._adapted: dict[int, Captured] = {}  # with adapters: captured when first needed
        self.pool: Any = None  # torch's handle on the memory the graphs share
        self.logits: Tensor | None = None  # [largest, vocab]: where every graph leaves them

    def capture(self, largest: int, progress: Callable[[int], None]) -> None:
        sizes = ladder(largest)
        shape = (largest, self.model.spec.vocab_size)
        self.logits = torch.empty(shape, dtype=torch.float32, device=self.rows.device)
        # the largest first: the others fit in its memory
        for done, size in enumerate(reversed(sizes)):
            self._graphs[size] = self._capture(size)
            progress(done + 1)

    def rung(self, rows: int) -> int | None:
        """The smallest captured size that holds this many rows."""
        return min((size for size in self._graphs if size >= rows), default=None)

    def replay(
        self,
        rows: list[int],
        positions: list[int],
        adapters: tuple[AdapterPages, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a decode step → logits [rows, vocab], the likeliest tokens and their logits, all of
        static memory.

        The likeliest tokens are already written to the rows. adapters: where some row has one, the
        pages and the table of rows that says which are whose.
        """
        size = self.rung(len(rows))
        assert size is not None
        if adapters is not None and size not in self._adapted:
            self._adapted[size] = self._capture(size, adapters)
        captured = (self._graphs if adapters is None else self._adapted)[size]
        captured.buffers.fill(rows, positions)
        captured.graph.replay()
        count = len(rows)
        return captured.logits[:count], captured.best[:count], captured.tokens[:count]

    def _capture(self, size: int, adapters: tuple[AdapterPages, Tensor] | None = None) -> Captured:
        kv_heads = self.model.spec.kv_heads
        buffers = DecodeBuffers(
            size, kv_heads, self.resident_ctas, self.rows.padding_row, self.rows.device
        )
        buffers.fill([], [])
        added = None if adapters is None else GpuStepAdapters(*adapters, decode_tiles(buffers.rows))
        graph, (logits, best, tokens) = record(lambda: self._run(buffers, added), size, self.pool)
        self.pool = self.pool or graph.pool()
        return Captured(graph, buffers, added, logits, best, tokens)

    def _run(
        self, buffers: DecodeBuffers, adapters: GpuStepAdapters | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids, slots = step_inputs(
            buffers.rows, buffers.positions, self.rows.tokens, self.rows.tables, self.block_tokens
        )
        attention = GpuAttention(
            self.rows.tables,
            self.block_tokens,
            self.resident_ctas,
            buffers.size,
            buffers.plan,
            None,
        )
        place = None if self.logits is None else self.logits[: buffers.size]
        logits = self.model(
            Step(ids, buffers.positions, slots, attention, None, adapters, place), self.cache
        )
        best, tokens = likeliest(logits)
        write_back(buffers.rows, buffers.lengths, tokens, self.rows.tokens)
        return logits, best, tokens
