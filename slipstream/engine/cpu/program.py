"""The program of a step: a model's layers as operations on buffers of a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.engine.cpu.attention_program import (
    address_of,
    attention_operations,
    heads_operation,
    merge_operation,
)
from slipstream.engine.cpu.buffers import Activations, Buffers, Cache
from slipstream.engine.cpu.expert_program import write_mixture
from slipstream.engine.cpu.head_program import write_embedding, write_head
from slipstream.engine.cpu.layer_weights import (
    HeadNorms,
    LayerWeights,
    LinearWeights,
    NormWeights,
)
from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.cpu.step_parts import Segment
from slipstream.kernels.adapter_layout import DOWN_PROJ, O_PROJ, QKV, UP_PROJ
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Copy,
    Entry,
    Epilogue,
    Format,
    Linear,
    Norm,
    Rows,
    encode,
)
from slipstream.kernels.cpu.quantised_layouts import LAYOUT_OF


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
        write_embedding(self)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            self._layer(index, layer, index == last)
        write_head(self, self._gathers_late)
        self._end_segment()
        return self._segments

    def _end_segment(self) -> None:
        if self.entries:
            self._segments.append(encode(self.entries))
        self.entries = []

    def _adapt(
        self, index: int, linear: int, x: np.ndarray, y: Sequence[np.ndarray], scale: float = 1.0
    ) -> None:
        """Let torch add the adapters' output for x, times scale, to y, the parts of a linear
        layer's output.
        """
        if self.adapted:
            from slipstream.engine.cpu.adapter_parts import AdapterPart

            self._end_segment()
            self._segments.append(AdapterPart(index, linear, x, y, scale))

    def add(self, operation: object, rows: Rows = Rows.TOKENS, **flags: bool) -> None:
        self.entries.append(Entry(operation, rows, **flags))  # type: ignore[arg-type]

    def _layer(self, index: int, layer: LayerWeights, is_last: bool) -> None:
        spec = self.spec
        buffers = self.buffers
        hidden = buffers.hidden
        if spec.parallel_residual:
            self._up(index, layer, hidden, buffers.second_x, Rows.TOKENS)
        kind = layer.qkv.takes
        norm = None if spec.norms_after else layer.input_norm
        x = self._norm_for(norm, hidden, buffers.x, kind, Rows.TOKENS)
        self.linear(layer.qkv, buffers.x.view(kind), buffers.qkv, own=True)
        self._adapt(index, QKV, x, [buffers.qkv[:, : spec.qkv_size]])
        self._attention(index, layer)
        rows = Rows.TOKENS
        # After the last layer only sampled tokens are used; of the others, keys and values are
        # enough.
        chooses = is_last and not self._gathers_late
        attended = self._merge(layer, chooses)
        if chooses:
            rows = Rows.SAMPLES
            self.copy(hidden, buffers.chosen, Format.F32, rows, gather=True)
            hidden = buffers.chosen
        x = buffers.attended_x.view(layer.dense.takes)
        adapter = (index, O_PROJ, attended)
        self._add_to(layer.dense, x, hidden, layer.attended_norm, rows, True, adapter)
        if spec.norms_after:
            self._normalise(layer.input_norm, hidden, rows)
        if not spec.parallel_residual:
            self._up(index, layer, hidden, buffers.x, rows)
        self._down(index, layer, hidden, rows)
        if spec.norms_after:
            self._normalise(layer.post_norm, hidden, rows)

    def _down(self, index: int, layer: LayerWeights, hidden: np.ndarray, rows: Rows) -> None:
        """Compute the MLP behind its activation."""
        if layer.down is None:
            return
        kind = layer.down.takes
        middle_format = self._middle_format(layer.down)
        middle = self.buffers.middle.view(middle_format)
        adapter = (index, DOWN_PROJ, middle[:, : self.spec.ffn_size])
        x = middle
        if middle_format is not kind:
            x = self.buffers.middle_x.view(kind)
            self.copy(middle, x, kind, rows, alone=True, width=layer.down.inputs)
        own = x is not middle
        self._add_to(layer.down, x, hidden, layer.mlp_norm, rows, own, adapter)

    def _normalise(self, norm: NormWeights | None, hidden: np.ndarray, rows: Rows) -> None:
        """Normalise the residual stream itself."""
        assert norm is not None
        self.norm(norm, hidden, hidden, Format.F32, rows, shared=True)

    def _middle_format(self, down: LinearWeights) -> Format:
        """Return the format that the activation between the MLP's linear layers is stored in."""
        if self.adapted or down.takes is Format.INT8:
            return Format.F32
        return down.takes

    @property
    def _gathers_late(self) -> bool:
        """Whether the tokens with logits are chosen behind the last layer, not inside it."""
        return self.spec.parallel_residual or self.adapted

    def _up(
        self, index: int, layer: LayerWeights, hidden: np.ndarray, target: Activations, rows: Rows
    ) -> None:
        """Compute the MLP up to its activation, or the whole one if it has experts."""
        norm = None if self.spec.norms_after else layer.post_norm or layer.input_norm
        if layer.up is None or layer.down is None:
            self._mixture(layer, norm, hidden, rows)
            return
        gated = self.spec.gated_mlp
        kind = layer.up.takes
        plain = self._norm_for(norm, hidden, target, kind, rows)
        x = target.view(kind)
        middle_format = self._middle_format(layer.down)
        middle = self.buffers.middle.view(middle_format)
        if not self.adapted:
            epilogue = Epilogue.GATE if gated else Epilogue.ACTIVATE
            self.linear(layer.up, x, middle, epilogue, rows, True, kind=middle_format)
            return
        from slipstream.engine.cpu.adapter_parts import ApplyGate

        up = self.buffers.up
        half = up.shape[1] // 2
        size = self.spec.ffn_size
        parts = [up[:, :half], up[:, half:]] if gated else [up]
        epilogue = Epilogue.SPLIT if gated else Epilogue.STORE
        self.linear(layer.up, x, up, epilogue, rows, own=True, second=address_of(parts[-1]))
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
        epilogue = Epilogue.STORE
        scale = 1.0
        if target is hidden:
            scale = self.spec.residual_scale
            epilogue = Epilogue.ADD if scale == 1.0 else Epilogue.ADD_SCALED
        self.linear(weights, x, target, epilogue, rows, own)
        self._adapt(*adapter, [target[:, : self.spec.hidden_size]], scale)
        self._finish_delta(hidden, norm, rows)

    def _mixture(
        self, layer: LayerWeights, norm: NormWeights | None, hidden: np.ndarray, rows: Rows
    ) -> None:
        """Add the result of the experts to the residual stream. norm: in front of them"""
        assert layer.mixture is not None
        direct = layer.mlp_norm is None and self.model.ranks.size == 1
        target = hidden if direct else self.buffers.delta
        scale = self.spec.residual_scale if direct else 1.0
        write_mixture(self, layer.mixture, norm, hidden, target, rows, direct, scale)
        self._finish_delta(hidden, layer.mlp_norm, rows)

    def _finish_delta(self, hidden: np.ndarray, norm: NormWeights | None, rows: Rows) -> None:
        """Sum the ranks' `delta`, normalise it and add it to the residual stream, where a linear
        layer has not done so.
        """
        if self.model.ranks.size > 1:
            self._sum(hidden if norm is None else None, rows)
        if norm is not None:
            self.norm(norm, self.buffers.delta, hidden, Format.F32, rows, adds=True)

    def _sum(self, hidden: np.ndarray | None, rows: Rows) -> None:
        """Sum the ranks' `delta`. hidden: the residual stream, if the sum is added to it"""
        from slipstream.engine.cpu.rank_parts import SumPart

        self._end_segment()
        samples = rows is Rows.SAMPLES
        scale = self.spec.residual_scale
        part = SumPart(self.model.ranks, self.buffers.delta, hidden, samples, scale)
        self._segments.append(part)

    def _norm_for(
        self,
        norm: NormWeights | None,
        source: np.ndarray,
        target: Activations,
        kind: Format,
        rows: Rows,
    ) -> np.ndarray:
        """Normalise rows into the format of a linear layer. Return what its adapters take.

        norm: None: the linear layer takes the rows as they are
        """
        if norm is None:
            self.copy(source, target.view(kind), kind, rows, alone=True)
            return source[:, : self.spec.hidden_size]
        plain = self.buffers.plain[:, : self.spec.hidden_size]
        if self.adapted:  # adapters take numbers that torch has
            self.norm(norm, source, self.buffers.plain, Format.F32, rows, shared=True)
            width = self.model.width  # rows of `plain` may be longer than those of the target
            self.copy(self.buffers.plain, target.view(kind), kind, rows, alone=True, width=width)
        else:
            self.norm(norm, source, target.view(kind), kind, rows)
        return plain

    def norm(
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
            source=address_of(source),
            source_stride=source.strides[0],
            gather=gather,
            target=address_of(target),
            target_stride=target.strides[0],
            target_own=0 if one else target.strides[0],
            format=kind,
            adds=adds,
            weight=address_of(norm.weight),
            bias=address_of(norm.bias),
            size=self.spec.hidden_size,
            width=self.model.width,
            epsilon=self.spec.norm_epsilon,
            layer=self.spec.norm == "layer",
        )
        self.add(operation, rows, alone=not one)

    def copy(
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
            source=address_of(source),
            source_stride=source.strides[0],
            gather=gather,
            target=address_of(target),
            target_stride=target.strides[0],
            target_own=target.strides[0] if alone else 0,
            format=kind,
            width=width or source.shape[1],
        )
        self.add(operation, rows, alone=alone)

    def linear(
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
                x=address_of(x),
                x_stride=x.strides[0],
                x_own=x.strides[0] if own else 0,
                target=address_of(target) + 4 * start,
                target_stride=weights.outputs * 4 if target is None else target.strides[0],
                epilogue=epilogue,
                bias=0 if weights.bias is None else address_of(weights.bias) + 4 * start,
                format=kind,
                activation=ACTIVATIONS.index(self.spec.activation),
                second=second,
                exact=weights.exact and packed.format in LAYOUT_OF,
                scale=self.spec.residual_scale,
            )
            start += packed.outputs
            # Two parts may be computed at the same time. Work counters serve no more.
            self.add(operation, rows, barrier=number > 0 or len(weights.parts) == 1)

    def _attention(self, index: int, layer: LayerWeights) -> None:
        self._change_heads(layer)
        for operation in attention_operations(self.model, self.buffers, self.cache, index, layer):
            self.add(operation)

    def _change_heads(self, layer: LayerWeights) -> None:
        """Change queries, keys and values before RoPE."""
        norms = layer.head_norms
        clip = self.spec.qkv_clip
        model = self.model
        if norms is not None and norms.together and model.ranks.size > 1:
            if clip:
                self.add(heads_operation(model, self.buffers, clip, None, None))
            self._normalise_all_heads(norms)
            clip = 0.0
            norms = None
        if clip or norms is not None or layer.query_scales is not None:
            self.add(heads_operation(model, self.buffers, clip, norms, layer.query_scales))

    def _normalise_all_heads(self, norms: HeadNorms) -> None:
        """Normalise queries and keys over the heads of all ranks."""
        from slipstream.engine.cpu.rank_parts import HeadNormPart

        spec = self.spec
        queries, keys, _ = np.split(
            self.buffers.qkv[:, : spec.qkv_size], (spec.q_size, spec.q_size + spec.kv_size), axis=1
        )
        weights = (norms.q_weight, norms.k_weight)
        self._end_segment()
        part = HeadNormPart(self.model.ranks, (queries, keys), weights, spec.norm_epsilon)
        self._segments.append(part)

    def _merge(self, layer: LayerWeights, gather: bool) -> np.ndarray:
        """Merge the results of attention into the format of the output projection. Return what its
        adapters take.
        """
        buffers = self.buffers
        kind = layer.dense.takes
        width = buffers.attended.shape[1]
        target = buffers.attended_x.view(kind)
        plain = buffers.plain
        goal = plain if self.adapted else target
        operation = merge_operation(
            self.model,
            buffers,
            layer,
            gather=gather,
            target=address_of(goal),
            target_stride=goal.strides[0],
            target_own=0 if self.adapted else goal.strides[0],
            format=Format.F32 if self.adapted else kind,
        )
        rows = Rows.SAMPLES if gather else Rows.TOKENS
        self.add(operation, rows, alone=not self.adapted)
        if self.adapted:
            self.copy(plain, target, kind, rows, alone=True, width=width)
        return plain[:, : self.spec.q_size]
