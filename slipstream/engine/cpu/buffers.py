"""The memory of a step: the cache, and rows of numbers between its operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.engine.cpu.model import CpuModel
from slipstream.kernels.cpu.layout import BLOCK, LANES
from slipstream.kernels.cpu.memory import aligned, aligned_rows, round_up
from slipstream.kernels.cpu.operations import Format, row_bytes

PART = 4096  # tokens of a part of the vocabulary
_ELEMENTS = {Format.F32: np.float32, Format.BF16: np.uint16, Format.INT8: np.uint8}


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of a runner are: [layers, 2, kv_heads, slots, head_size]."""

    address: int
    layer_bytes: int
    values_offset: int  # from the keys of a layer to its values
    head_bytes: int  # of a KV head of a layer


class Activations:
    """Rows that linear layers take, in the format of their weights."""

    def __init__(self, rows: int, width: int) -> None:
        self._rows = rows
        self._width = width
        self._memory = aligned(rows * row_bytes(Format.F32, width))

    def view(self, kind: Format) -> np.ndarray:
        """Return the rows in a format: float32, bfloat16 as uint16, or bytes."""
        row = row_bytes(kind, self._width)
        found = self._memory[: self._rows * row]
        return found.view(_ELEMENTS[kind]).reshape(self._rows, -1)


class ExpertBuffers:
    """The memory of experts. A pair is a token and one of its experts."""

    def __init__(self, model: CpuModel, tokens: int) -> None:
        experts = model.spec.experts
        assert experts is not None
        held = len(experts.held_by(model.ranks.rank, model.ranks.size))
        pairs = tokens * experts.per_token
        self.logits = aligned_rows(tokens, round_up(experts.count, BLOCK), np.float32)
        self.chosen = aligned_rows(tokens, experts.per_token, np.int64)
        self.weights = aligned_rows(tokens, experts.per_token, np.float32)
        self.counts = aligned_rows(1, held, np.int64)
        self.work = aligned_rows(1, 1 + 3 * held, np.int64)
        self.tokens = aligned_rows(1, pairs, np.int64)
        self.places = aligned_rows(1, pairs, np.int64)
        self.x = Activations(pairs, model.width)
        self.middle = Activations(pairs, model.expert_width)
        self.middle_x = Activations(pairs, model.expert_width)
        self.outputs = aligned_rows(pairs, model.width, np.float32)
        self.shared = aligned_rows(tokens, model.width, np.float32)
        self.shared_logits = aligned_rows(tokens, BLOCK, np.float32)


class Buffers:
    """The memory of a step with up to `tokens` tokens."""

    def __init__(self, model: CpuModel, tokens: int, threads: int) -> None:
        spec = model.spec
        self.tokens = tokens
        width = np.float32 if model.format is Format.F32 else np.uint16
        rows = max(tokens, threads)  # in a private step each thread has a row of its own
        attended = round_up(spec.q_size, BLOCK)
        self.hidden = aligned_rows(tokens, model.width, np.float32)
        self.chosen = aligned_rows(tokens, model.width, np.float32)  # hidden of the samples
        # of another size than hidden: embeddings and final states that are projected
        self.projected = aligned_rows(tokens, model.states_width, np.float32)
        self.x = Activations(rows, max(model.width, model.states_width))
        self.second_x = Activations(rows, model.width)
        self.attended_x = Activations(rows, attended)
        self.states = Activations(rows, model.states_width)  # of the samples, normalised
        self.float_states = aligned_rows(tokens, model.states_width, np.float32)
        # float32 rows in front of another format
        self.plain = aligned_rows(tokens, max(model.width, attended), np.float32)
        self.delta = aligned_rows(tokens, model.width, np.float32)
        self.qkv = aligned_rows(tokens, round_up(spec.qkv_size, BLOCK), np.float32)
        self.queries = aligned_rows(tokens, spec.q_size, width)
        self.attended = aligned_rows(tokens, attended, np.float32)
        self.middle = Activations(tokens, model.middle_width)
        self.middle_x = Activations(rows, model.middle_width)
        # the halves of a gated layer, or the outputs of another one, before the activation
        half = round_up(spec.ffn_size, LANES)
        self.up = aligned_rows(tokens, half * 2, np.float32)
        self.experts = None if spec.experts is None else ExpertBuffers(model, tokens)
        self.parts = -(-len(model.vocabulary) // PART)
        self.best_tokens = aligned_rows(tokens, self.parts, np.int64)
        self.best_logits = aligned_rows(tokens, self.parts, np.float32)
