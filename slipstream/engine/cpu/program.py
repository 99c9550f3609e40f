"""The program of a step: a model's layers as operations on buffers of a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.engine.cpu.adapter_parts import AdapterPart, ApplyGate, StepParts
from slipstream.engine.cpu.model import CpuModel, LayerWeights, LinearWeights, NormWeights
from slipstream.kernels.adapters import DOWN_PROJ, O_PROJ, QKV, UP_PROJ
from slipstream.kernels.cpu.layout import BLOCK, LANES
from slipstream.kernels.cpu.memory import aligned_rows, round_up
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Attention,
    Copy,
    Embed,
    Entry,
    Epilogue,
    Format,
    Likeliest,
    Linear,
    Merge,
    Norm,
    Rope,
    Rows,
    Softcap,
    encode,
)

# Operations that compiled code carries out in one call, or a part that torch carries out
Segment = np.ndarray | Callable[[StepParts], None]

NO_WINDOW = 2**30  # larger than any position
_PART = 4096  # tokens of a part of the vocabulary


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of a runner are: [layers, 2, kv_heads, slots, head_size]."""

    address: int
    layer_bytes: int
    values_offset: int  # from the keys of a layer to its values
    head_bytes: int  # of a KV head of a layer


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
        self.x = aligned_rows(rows, model.width, width)
        self.second_x = aligned_rows(rows, model.width, width)
        self.attended_x = aligned_rows(rows, attended, width)
        self.states = aligned_rows(rows, model.width, width)  # of the samples, normalised
        self.delta = aligned_rows(tokens, model.width, np.float32)
        self.qkv = aligned_rows(tokens, round_up(spec.qkv_size, BLOCK), np.float32)
        self.queries = aligned_rows(tokens, spec.q_size, width)
        self.attended = aligned_rows(tokens, attended, np.float32)
        self.middle = aligned_rows(tokens, model.middle_width, width)
        # the halves of a gated layer, or the outputs of another one, before the activation
        half = round_up(spec.ffn_size, LANES)
        self.up = aligned_rows(tokens, half * 2, np.float32)
        self.parts = -(-spec.vocab_size // _PART)
        self.best_tokens = aligned_rows(tokens, self.parts, np.int64)
        self.best_logits = aligned_rows(tokens, self.parts, np.float32)


class ProgramWriter:
    """Writes the operations of a model's step."""

    def __init__(
        self, model: CpuModel, buffers: Buffers, cache: Cache, adapted: bool = False
    ) -> None:
        """adapted: tokens have LoRA adapters, which torch adds behind the linear layers"""
        self.adapted = adapted
        self._segments: list[Segment] = []
        self.model = model
        self.spec = model.spec
        self.buffers = buffers
        self.cache = cache
        self.entries: list[Entry] = []

    def write(self) -> list[Segment]:
        """Return the program."""
        self._embed()
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            self._layer(index, layer, index == last)
        self._head()
        self._end_segment()
        return self._segments

    def _end_segment(self) -> None:
        if self.entries:
            self._segments.append(encode(self.entries))
        self.entries = []

    def _adapt(self, index: int, linear: int, x: np.ndarray, y: Sequence[np.ndarray]) -> None:
        """Let torch add the adapters' output for x to y, the parts of a linear layer's output."""
        if self.adapted:
            self._end_segment()
            self._segments.append(AdapterPart(index, linear, x, y))

    def _add(self, operation: object, rows: Rows = Rows.TOKENS, **flags: bool) -> None:
        self.entries.append(Entry(operation, rows, **flags))  # type: ignore[arg-type]

    def _embed(self) -> None:
        table = self.model.embedding
        learned = self.model.learned_positions
        hidden = self.buffers.hidden
        self._add(
            Embed(
                target=_address(hidden),
                target_stride=hidden.strides[0],
                table=table.address,
                table_format=table.format,
                size=self.spec.hidden_size,
                block_bytes=table.block_bytes,
                scale=self.model.embedding_scale,
                positions=_address(learned),
            )
        )

    def _layer(self, index: int, layer: LayerWeights, is_last: bool) -> None:
        spec = self.spec
        buffers = self.buffers
        hidden = buffers.hidden
        self._norm(layer.input_norm, hidden, buffers.x)
        if spec.parallel_residual:
            mlp_input = buffers.x
            if layer.post_norm is not None:
                mlp_input = buffers.second_x
                self._norm(layer.post_norm, hidden, mlp_input)
            self._up(index, layer, mlp_input, Rows.TOKENS)
        self._linear(layer.qkv, buffers.x, buffers.qkv, own=True)
        self._adapt(index, QKV, buffers.x[:, : spec.hidden_size], [buffers.qkv[:, : spec.qkv_size]])
        self._attention(index, layer)
        rows = Rows.TOKENS
        # After the last layer only sampled tokens are used; of the others, keys and values are
        # enough.
        chooses = is_last and not self._gathers_late
        self._merge(chooses)
        if chooses:
            rows = Rows.SAMPLES
            self._copy(hidden, buffers.chosen, Format.F32, rows, gather=True)
            hidden = buffers.chosen
        attended = (index, O_PROJ, buffers.attended_x[:, : spec.q_size])
        self._add_to(layer.dense, buffers.attended_x, hidden, layer.attended_norm, rows, attended)
        if not spec.parallel_residual:
            norm = layer.post_norm or layer.input_norm
            self._norm(norm, hidden, buffers.x, rows)
            self._up(index, layer, buffers.x, rows)
        middle = (index, DOWN_PROJ, buffers.middle[:, : spec.ffn_size])
        self._add_to(layer.down, buffers.middle, hidden, layer.mlp_norm, rows, middle)

    @property
    def _gathers_late(self) -> bool:
        """Whether the tokens with logits are chosen behind the last layer, not inside it."""
        return self.spec.parallel_residual or self.adapted

    def _up(self, index: int, layer: LayerWeights, x: np.ndarray, rows: Rows) -> None:
        gated = self.spec.gated_mlp
        middle = self.buffers.middle
        if not self.adapted:
            epilogue = Epilogue.GATE if gated else Epilogue.ACTIVATE
            self._linear(layer.up, x, middle, epilogue, rows, own=True)
            return
        up = self.buffers.up
        half = up.shape[1] // 2
        size = self.spec.ffn_size
        parts = [up[:, :half], up[:, half:]] if gated else [up]
        epilogue = Epilogue.SPLIT if gated else Epilogue.STORE
        self._linear(layer.up, x, up, epilogue, rows, own=True, second=_address(parts[-1]))
        chosen = [part[:, :size] for part in parts]
        self._adapt(index, UP_PROJ, x[:, : self.spec.hidden_size], chosen)
        self._segments.append(ApplyGate(self.spec.activation, chosen, middle[:, :size]))

    def _add_to(
        self,
        weights: LinearWeights,
        x: np.ndarray,
        hidden: np.ndarray,
        norm: NormWeights | None,
        rows: Rows,
        adapter: tuple[int, int, np.ndarray],
    ) -> None:
        """Add a linear layer's result, normalised if there is a norm, to the residual stream.

        adapter: layer, number of the linear layer and its input, for `_adapt`
        """
        own = x is self.buffers.attended_x
        target = hidden if norm is None else self.buffers.delta
        epilogue = Epilogue.ADD if norm is None else Epilogue.STORE
        self._linear(weights, x, target, epilogue, rows, own)
        self._adapt(*adapter, [target[:, : self.spec.hidden_size]])
        if norm is not None:
            self._norm(norm, self.buffers.delta, hidden, rows, adds=True)

    def _norm(
        self,
        norm: NormWeights,
        source: np.ndarray,
        target: np.ndarray,
        rows: Rows = Rows.TOKENS,
        adds: bool = False,
        gather: bool = False,
    ) -> None:
        operation = Norm(
            source=_address(source),
            source_stride=source.strides[0],
            gather=gather,
            target=_address(target),
            target_stride=target.strides[0],
            target_own=0 if adds else target.strides[0],
            format=self.model.format,
            adds=adds,
            weight=_address(norm.weight),
            bias=_address(norm.bias),
            size=self.spec.hidden_size,
            width=self.model.width,
            epsilon=self.spec.norm_epsilon,
            layer=self.spec.norm == "layer",
        )
        self._add(operation, rows, alone=not adds)

    def _copy(
        self,
        source: np.ndarray,
        target: np.ndarray,
        kind: Format,
        rows: Rows,
        gather: bool = False,
        alone: bool = False,
    ) -> None:
        operation = Copy(
            source=_address(source),
            source_stride=source.strides[0],
            gather=gather,
            target=_address(target),
            target_stride=target.strides[0],
            target_own=target.strides[0] if alone else 0,
            format=kind,
            width=self.model.width,
        )
        self._add(operation, rows, alone=alone)

    def _linear(
        self,
        weights: LinearWeights,
        x: np.ndarray,
        target: np.ndarray | None,
        epilogue: Epilogue = Epilogue.STORE,
        rows: Rows = Rows.TOKENS,
        own: bool = False,
        second: int = 0,
    ) -> None:
        """own: in a private step each thread has its own x. target None: the logits"""
        packed = weights.packed
        operation = Linear(
            weights=packed.address,
            weight_format=packed.format,
            block_bytes=packed.block_bytes,
            blocks=packed.blocks,
            inputs=packed.inputs,
            x=_address(x),
            x_stride=x.strides[0],
            x_own=x.strides[0] if own else 0,
            target=_address(target),
            target_stride=packed.outputs * 4 if target is None else target.strides[0],
            epilogue=epilogue,
            bias=_address(weights.bias),
            format=self.model.format,
            activation=ACTIVATIONS.index(self.spec.activation),
            second=second,
        )
        self._add(operation, rows)

    def _attention(self, index: int, layer: LayerWeights) -> None:
        spec = self.spec
        buffers = self.buffers
        keys = self.cache.address + index * self.cache.layer_bytes
        values = keys + self.cache.values_offset
        cosine, sine = self.model.rope.get(layer.theta, (None, None))
        rope = Rope(
            source=_address(buffers.qkv),
            source_stride=buffers.qkv.strides[0],
            queries=_address(buffers.queries),
            query_stride=buffers.queries.strides[0],
            format=self.model.format,
            keys=keys,
            values=values,
            head_stride=self.cache.head_bytes,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            cosine=_address(cosine),
            sine=_address(sine),
            half=self.model.half,
            q_norm=_address(layer.q_norm),
            k_norm=_address(layer.k_norm),
            epsilon=spec.norm_epsilon,
        )
        self._add(rope)
        rule = layer.rule
        attention = Attention(
            queries=rope.queries,
            query_stride=rope.query_stride,
            format=self.model.format,
            keys=keys,
            values=values,
            head_stride=self.cache.head_bytes,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            target=_address(buffers.attended),
            target_stride=buffers.attended.strides[0],
            scale=rule.scale,
            softcap=rule.softcap,
            window=NO_WINDOW if rule.window is None else rule.window,
            sinks=0 if rule.window is None else rule.sinks,
        )
        self._add(attention)

    def _merge(self, gather: bool) -> None:
        buffers = self.buffers
        operation = Merge(
            source=_address(buffers.attended),
            source_stride=buffers.attended.strides[0],
            gather=gather,
            target=_address(buffers.attended_x),
            target_stride=buffers.attended_x.strides[0],
            target_own=buffers.attended_x.strides[0],
            format=self.model.format,
            width=buffers.attended.shape[1],
            heads=self.spec.heads,
            head_size=self.spec.head_size,
        )
        self._add(operation, Rows.SAMPLES if gather else Rows.TOKENS, alone=True)

    def _head(self) -> None:
        model = self.model
        buffers = self.buffers
        spec = self.spec
        gather = self._gathers_late
        source = buffers.hidden if gather else buffers.chosen
        if model.final_norm is not None:
            self._norm(model.final_norm, source, buffers.states, Rows.SAMPLES, gather=gather)
        else:
            self._copy(source, buffers.states, model.format, Rows.SAMPLES, gather, alone=True)
        self._linear(model.head, buffers.states, None, rows=Rows.LOGITS, own=True)
        stride = model.head.packed.outputs * 4
        if spec.final_softcap:
            width = model.head.packed.outputs
            self._add(Softcap(0, stride, width, spec.final_softcap), Rows.LOGITS)
        self._add(
            Likeliest(
                stride=stride,
                vocabulary=spec.vocab_size,
                part=_PART,
                parts=buffers.parts,
                tokens=_address(buffers.best_tokens),
                logits=_address(buffers.best_logits),
            ),
            Rows.LOGITS,
        )


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
