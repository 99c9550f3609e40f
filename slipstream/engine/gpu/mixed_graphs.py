"""Steps with few tokens of prompts as CUDA graphs: the device is done with them before a host has
launched them.

A captured step has room for rows with one token, which come first, and for tokens of rows with
several. Rows that nobody owns pad the former; the padding of the latter is one more row with
several tokens, so that everything a kernel may read has been computed like the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.gpu.graphs import Numbers, record
from slipstream.engine.rows import Rows
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_chunks import (
    CHUNK_FIELDS,
    DecodePlan,
    ResidentCtas,
    cut_chunks,
    max_chunks,
)
from slipstream.kernels.gpu.prefill_tiles import QUERY_TILE, PrefillPlan, cut_tiles
from slipstream.kernels.gpu.step import step_inputs
from slipstream.model.transformer import Step, Transformer

_DECODES = (16, 128)  # rows with one token
# of rows with several; with more, the device takes longer than the host
_TOKENS = (64, 128, 256, 512)
PROMPTS = 16  # rows with several
SIZES = [(decodes, tokens) for decodes in _DECODES for tokens in _TOKENS]


class MixedBuffers:
    """The numbers of a step of up to `decodes` rows with one token and `tokens` tokens of other
    rows.
    """

    def __init__(
        self,
        decodes: int,
        tokens: int,
        kv_heads: int,
        resident_ctas: ResidentCtas,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self.decodes, self.tokens = decodes, tokens
        self.kv_heads, self.resident_ctas, self.padding_row = kv_heads, resident_ctas, padding_row
        chunks, tiles = (
            max_chunks(decodes, kv_heads, resident_ctas),
            tokens // QUERY_TILE + PROMPTS + 1,
        )
        total, wanted = decodes + tokens, decodes + PROMPTS
        rooms = [total, total, wanted, chunks * CHUNK_FIELDS, *[tiles] * 5]
        self._numbers = Numbers(rooms, device)
        self.rows, self.positions, self.wanted, cut = self._numbers.arrays[:4]
        self.decode = DecodePlan(cut.view(-1, CHUNK_FIELDS))
        self.prefill = PrefillPlan(*self._numbers.arrays[4:])  # type: ignore[arg-type]

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray, wanted: np.ndarray
    ) -> None:
        """Of the step's rows, those with one token first; wanted: the tokens whose logits are."""
        decodes = int((counts == 1).sum())
        idle, left = self.decodes - decodes, self.tokens - int(counts[decodes:].sum())
        single_rows = np.append(rows[:decodes], np.full(idle, self.padding_row))
        single_positions = np.append(positions[:decodes], np.zeros(idle, dtype=np.int64))
        rows, positions = (
            np.append(rows[decodes:], self.padding_row),
            np.append(positions[decodes:], 0),
        )
        counts = np.append(counts[decodes:], left)
        offsets = self.decodes + np.cumsum(counts) - counts
        place = np.arange(self.decodes, self.decodes + self.tokens)
        own_positions = place + np.repeat(positions - offsets, counts)
        own_positions[self.tokens - left :] = 0  # the padding row has no more than one block
        chunks = cut_chunks(single_rows, single_positions + 1, self.kv_heads, self.resident_ctas)
        tiles = cut_tiles(rows, positions, counts, offsets)
        self._numbers.fill(
            [
                np.append(single_rows, np.repeat(rows, counts)),
                np.append(single_positions, own_positions),
                np.where(wanted < decodes, wanted, wanted + idle),
                chunks.ravel(),
                *tiles,
            ]
        )


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    buffers: MixedBuffers
    logits: Tensor  # [wanted, vocab]


class MixedGraphs:
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
        self._graphs: dict[tuple[int, int], _Captured] = {}

    def capture(self, pool: Any, progress: Callable[[int], None]) -> None:
        """pool: memory that other graphs use, too, which never run at the same time."""
        shape = (max(_DECODES) + PROMPTS, self.model.spec.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=self.rows.device)
        for done, size in enumerate(reversed(SIZES)):
            self._graphs[size] = self._capture(*size, pool, logits)
            progress(done + 1)

    def _capture(self, decodes: int, tokens: int, pool: Any, logits: Tensor) -> _Captured:
        kv_heads, device = self.model.spec.kv_heads, self.rows.device
        buffers = MixedBuffers(
            decodes, tokens, kv_heads, self.resident_ctas, self.rows.padding_row, device
        )
        nothing = np.zeros(0, dtype=np.int64)
        buffers.fill(nothing, nothing, nothing, nothing)
        graph, result = record(
            lambda: self._run(buffers, logits[: decodes + PROMPTS]), decodes + tokens, pool
        )
        return _Captured(graph, buffers, result)

    def size(self, counts: np.ndarray, wanted: np.ndarray) -> tuple[int, int] | None:
        """The smallest captured step that holds rows with so many tokens each and gives so many
        logits.
        """
        decodes = int((counts == 1).sum())
        tokens = int(counts.sum()) - decodes
        if len(counts) - decodes > PROMPTS:
            return None
        least = max(decodes, len(wanted) - PROMPTS)
        return min(
            (size for size in self._graphs if size[0] >= least and size[1] >= tokens),
            key=sum,
            default=None,
        )

    def replay(
        self,
        size: tuple[int, int],
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        wanted: np.ndarray,
    ) -> Tensor:
        """→ logits [wanted, vocab], in static memory"""
        captured = self._graphs[size]
        captured.buffers.fill(rows, positions, counts, wanted)
        captured.graph.replay()
        return captured.logits[: len(wanted)]

    def _run(self, buffers: MixedBuffers, logits: Tensor) -> Tensor:
        ids, slots = step_inputs(
            buffers.rows, buffers.positions, self.rows.tokens, self.rows.tables, self.block_tokens
        )
        attention = GpuAttention(
            self.rows.tables,
            self.block_tokens,
            self.resident_ctas,
            buffers.decodes,
            buffers.decode,
            buffers.prefill,
        )
        return self.model(
            Step(ids, buffers.positions, slots, attention, buffers.wanted, None, logits), self.cache
        )
