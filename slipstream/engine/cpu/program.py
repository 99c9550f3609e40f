"""The program of a step: a model's layers as operations on buffers of a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.engine.cpu.model import CpuModel, LayerWeights, LinearWeights, NormWeights
from slipstream.engine.cpu.step_parts import Segment
from slipstream.kernels.adapter_layout import DOWN_PROJ, O_PROJ, QKV, UP_PROJ
from slipstream.kernels.cpu.layout import BLOCK, LANES
from slipstream.kernels.cpu.memory import aligned, aligned_rows, round_up
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
    Refine,
    Rope,
    Rows,
    Softcap,
    encode,
    row_bytes,
)
from slipstream.kernels.cpu.quantised_layouts import LAYOUT_OF

NO_WINDOW = 2**30  # larger than any position
_PART = 4096  # tokens of a part of the vocabulary
# Several times what quantised weights shift a logit by.
_REFINED_MARGIN = 3.0
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
        self.x = Activations(rows, model.width)
        self.second_x = Activations(rows, model.width)
        self.attended_x = Activations(rows, attended)
        self.states = Activations(rows, model.width)  # of the samples, normalised
        self.float_states = aligned_rows(tokens, model.width, np.float32)
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
        self.parts = -(-len(model.vocabulary) // _PART)
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
            from slipstream.engine.cpu.adapter_parts import AdapterPart

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
                block_bytes=table.stride,
                scale=self.model.embedding_scale,
                positions=_address(learned),
            )
        )

    def _layer(self, index: int, layer: LayerWeights, is_last: bool) -> None:
        spec = self.spec
        buffers = self.buffers
        hidden = buffers.hidden
        if spec.parallel_residual:
            self._up(index, layer, hidden, buffers.second_x, Rows.TOKENS)
        kind = layer.qkv.takes
        x = self._norm_for(layer.input_norm, hidden, buffers.x, kind, Rows.TOKENS)
        self._linear(layer.qkv, buffers.x.view(kind), buffers.qkv, own=True)
        self._adapt(index, QKV, x, [buffers.qkv[:, : spec.qkv_size]])
        self._attention(index, layer)
        rows = Rows.TOKENS
        # After the last layer only sampled tokens are used; of the others, keys and values are
        # enough.
        chooses = is_last and not self._gathers_late
        attended = self._merge(layer.dense.takes, chooses)
        if chooses:
            rows = Rows.SAMPLES
            self._copy(hidden, buffers.chosen, Format.F32, rows, gather=True)
            hidden = buffers.chosen
        x = buffers.attended_x.view(layer.dense.takes)
        adapter = (index, O_PROJ, attended)
        self._add_to(layer.dense, x, hidden, layer.attended_norm, rows, True, adapter)
        if not spec.parallel_residual:
            self._up(index, layer, hidden, buffers.x, rows)
        kind = layer.down.takes
        middle = buffers.middle.view(self._middle_format(layer))
        adapter = (index, DOWN_PROJ, middle[:, : spec.ffn_size])
        x = middle
        if self._middle_format(layer) is not kind:
            x = buffers.middle_x.view(kind)
            self._copy(middle, x, kind, rows, alone=True)
        own = x is not middle
        self._add_to(layer.down, x, hidden, layer.mlp_norm, rows, own, adapter)

    def _middle_format(self, layer: LayerWeights) -> Format:
        """Return the format that the activation between the MLP's linear layers is stored in."""
        if self.adapted or layer.down.takes is Format.INT8:
            return Format.F32
        return layer.down.takes

    @property
    def _gathers_late(self) -> bool:
        """Whether the tokens with logits are chosen behind the last layer, not inside it."""
        return self.spec.parallel_residual or self.adapted

    def _up(
        self, index: int, layer: LayerWeights, hidden: np.ndarray, target: Activations, rows: Rows
    ) -> None:
        """Compute the MLP up to its activation."""
        gated = self.spec.gated_mlp
        kind = layer.up.takes
        norm = layer.post_norm or layer.input_norm
        plain = self._norm_for(norm, hidden, target, kind, rows)
        x = target.view(kind)
        middle = self.buffers.middle.view(self._middle_format(layer))
        if not self.adapted:
            epilogue = Epilogue.GATE if gated else Epilogue.ACTIVATE
            self._linear(layer.up, x, middle, epilogue, rows, True, kind=self._middle_format(layer))
            return
        from slipstream.engine.cpu.adapter_parts import ApplyGate

        up = self.buffers.up
        half = up.shape[1] // 2
        size = self.spec.ffn_size
        parts = [up[:, :half], up[:, half:]] if gated else [up]
        epilogue = Epilogue.SPLIT if gated else Epilogue.STORE
        self._linear(layer.up, x, up, epilogue, rows, own=True, second=_address(parts[-1]))
        chosen = [part[:, :size] for part in parts]
        self._adapt(index, UP_PROJ, plain, chosen)
        self._segments.append(ApplyGate(self.spec.activation, chosen, middle[:, :size]))

    def _add_to(
        self,
        weights: LinearWeights,
        x: np.ndarray,
        hidden: np.ndarray,
        norm: NormWeights | None,
        rows: Rows,
        own: bool,
        adapter: tuple[int, int, np.ndarray],
    ) -> None:
        """Add a linear layer's result, normalised if there is a norm, to the residual stream.

        adapter: layer, number of the linear layer and its input, for `_adapt`
        """
        alone = self.model.ranks.size == 1
        target = hidden if norm is None and alone else self.buffers.delta
        epilogue = Epilogue.ADD if target is hidden else Epilogue.STORE
        self._linear(weights, x, target, epilogue, rows, own)
        self._adapt(*adapter, [target[:, : self.spec.hidden_size]])
        if not alone:
            self._sum(hidden if norm is None else None, rows)
        if norm is not None:
            self._norm(norm, self.buffers.delta, hidden, Format.F32, rows, adds=True)

    def _sum(self, hidden: np.ndarray | None, rows: Rows) -> None:
        """Sum the ranks' `delta`. hidden: the residual stream, if the sum is added to it"""
        from slipstream.engine.cpu.rank_parts import SumPart

        self._end_segment()
        part = SumPart(self.model.ranks, self.buffers.delta, hidden, rows is Rows.SAMPLES)
        self._segments.append(part)

    def _norm_for(
        self,
        norm: NormWeights,
        source: np.ndarray,
        target: Activations,
        kind: Format,
        rows: Rows,
    ) -> np.ndarray:
        """Normalise rows into the format of a linear layer. Return what its adapters take."""
        plain = self.buffers.plain[:, : self.spec.hidden_size]
        if self.adapted:  # adapters take numbers that torch has
            self._norm(norm, source, self.buffers.plain, Format.F32, rows, shared=True)
            self._copy(self.buffers.plain, target.view(kind), kind, rows, alone=True)
        else:
            self._norm(norm, source, target.view(kind), kind, rows)
        return plain

    def _norm(
        self,
        norm: NormWeights,
        source: np.ndarray,
        target: np.ndarray,
        kind: Format,
        rows: Rows = Rows.TOKENS,
        adds: bool = False,
        gather: bool = False,
        shared: bool = False,
    ) -> None:
        """shared: in a private step the threads have one target, not one each"""
        one = adds or shared
        operation = Norm(
            source=_address(source),
            source_stride=source.strides[0],
            gather=gather,
            target=_address(target),
            target_stride=target.strides[0],
            target_own=0 if one else target.strides[0],
            format=kind,
            adds=adds,
            weight=_address(norm.weight),
            bias=_address(norm.bias),
            size=self.spec.hidden_size,
            width=self.model.width,
            epsilon=self.spec.norm_epsilon,
            layer=self.spec.norm == "layer",
        )
        self._add(operation, rows, alone=not one)

    def _copy(
        self,
        source: np.ndarray,
        target: np.ndarray,
        kind: Format,
        rows: Rows,
        gather: bool = False,
        alone: bool = False,
        width: int = 0,
    ) -> None:
        """width: elements of a row; 0: those of the source"""
        operation = Copy(
            source=_address(source),
            source_stride=source.strides[0],
            gather=gather,
            target=_address(target),
            target_stride=target.strides[0],
            target_own=target.strides[0] if alone else 0,
            format=kind,
            width=width or source.shape[1],
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
        kind: Format = Format.F32,
    ) -> None:
        """own: in a private step each thread has its own x. target None: the logits. kind: the
        format of the target of an activation
        """
        start = 0
        for number, packed in enumerate(weights.parts):
            operation = Linear(
                weights=packed.address,
                weight_format=packed.format,
                block_bytes=packed.block_bytes,
                blocks=packed.blocks,
                inputs=packed.inputs,
                x=_address(x),
                x_stride=x.strides[0],
                x_own=x.strides[0] if own else 0,
                target=_address(target) + 4 * start,
                target_stride=weights.outputs * 4 if target is None else target.strides[0],
                epilogue=epilogue,
                bias=0 if weights.bias is None else _address(weights.bias) + 4 * start,
                format=kind,
                activation=ACTIVATIONS.index(self.spec.activation),
                second=second,
                exact=weights.exact and packed.format in LAYOUT_OF,
            )
            start += packed.outputs
            # Two parts may be computed at the same time. Work counters serve no more.
            self._add(operation, rows, barrier=number > 0 or len(weights.parts) == 1)

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

    def _merge(self, kind: Format, gather: bool) -> np.ndarray:
        """Merge the results of attention into the format of the output projection. Return what its
        adapters take.
        """
        buffers = self.buffers
        width = buffers.attended.shape[1]
        target = buffers.attended_x.view(kind)
        plain = buffers.plain
        goal = plain if self.adapted else target
        operation = Merge(
            source=_address(buffers.attended),
            source_stride=buffers.attended.strides[0],
            gather=gather,
            target=_address(goal),
            target_stride=goal.strides[0],
            target_own=0 if self.adapted else goal.strides[0],
            format=Format.F32 if self.adapted else kind,
            width=width,
            heads=self.spec.heads,
            head_size=self.spec.head_size,
        )
        rows = Rows.SAMPLES if gather else Rows.TOKENS
        self._add(operation, rows, alone=not self.adapted)
        if self.adapted:
            self._copy(plain, target, kind, rows, alone=True, width=width)
        return plain[:, : self.spec.q_size]

    def _head(self) -> None:
        model = self.model
        buffers = self.buffers
        spec = self.spec
        gather = self._gathers_late
        source = buffers.hidden if gather else buffers.chosen
        kind = model.head.takes
        states = buffers.states.view(kind)
        for target, form in ((buffers.float_states, Format.F32), (states, kind)):
            is_shared = form is Format.F32 and target is buffers.float_states
            if model.final_norm is None:
                self._copy(source, target, form, Rows.SAMPLES, gather, not is_shared)
                continue
            norm = model.final_norm
            flags = {"gather": gather, "shared": is_shared}
            self._norm(norm, source, target, form, Rows.SAMPLES, **flags)
        self._linear(model.head, states, None, rows=Rows.LOGITS, own=True)
        stride = model.head.outputs * 4
        self._refine(stride)
        if spec.final_softcap:
            width = model.head.outputs
            self._add(Softcap(0, stride, width, spec.final_softcap), Rows.LOGITS)
        self._add(
            Likeliest(
                stride=stride,
                vocabulary=len(model.vocabulary),
                part=_PART,
                parts=buffers.parts,
                tokens=_address(buffers.best_tokens),
                logits=_address(buffers.best_logits),
            ),
            Rows.LOGITS,
        )

    def _refine(self, stride: int) -> None:
        """Compute the largest logits again if there are weights that are not quantised."""
        if not self.model.refines:
            return
        table = self.model.embedding
        states = self.buffers.float_states
        operation = Refine(
            stride=stride,
            vocabulary=len(self.model.vocabulary),
            states=_address(states),
            states_stride=states.strides[0],
            table=table.address + self.model.vocabulary.start * table.stride,
            table_format=table.format,
            row_bytes=table.stride,
            size=self.spec.hidden_size,
            bias=_address(self.model.head.bias),
            margin=_REFINED_MARGIN,
        )
        self._add(operation, Rows.LOGITS)


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
