"""The operations of a layer's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.engine.cpu.attention_program import address_of
from slipstream.engine.cpu.buffers import ExpertBuffers
from slipstream.engine.cpu.layer_weights import (
    ExpertWeights,
    LinearWeights,
    MixtureWeights,
    NormWeights,
)
from slipstream.kernels.cpu.layout import BLOCK
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Combine,
    Epilogue,
    ExpertLinear,
    Format,
    Gather,
    Group,
    Route,
    Rows,
)
from slipstream.model.options import Experts
from slipstream.model.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.engine.cpu.program import ProgramWriter


def write_mixture(
    writer: ProgramWriter,
    mixture: MixtureWeights,
    norm: NormWeights | None,
    hidden: np.ndarray,
    target: np.ndarray,
    rows: Rows,
    adds: bool,
    scale: float,
) -> None:
    """Write what experts compute from the residual stream. adds: add the result, times scale, to
    the target
    """
    buffers = writer.buffers
    own = buffers.experts
    experts = writer.spec.experts
    assert own is not None
    assert experts is not None
    source = hidden
    if norm is not None:
        source = buffers.plain
        writer.norm(norm, hidden, source, Format.F32, rows, shared=True)
    _take_linear(writer, mixture.router, source, own.logits, rows)
    writer.add(_route(experts, own), rows)
    writer.add(_group(experts, own, mixture.held), rows)
    _run_experts(writer, mixture, source, rows)
    if mixture.shared_up is not None and mixture.shared_down is not None:
        _run_shared(writer, mixture.shared_up, mixture.shared_down, source, rows)
    if mixture.shared_router is not None:
        _take_linear(writer, mixture.shared_router, source, own.shared_logits, rows)
    shared = None if mixture.shared_up is None else own.shared
    logits = None if mixture.shared_router is None else own.shared_logits
    combine = Combine(
        source=address_of(own.outputs),
        source_stride=own.outputs.strides[0],
        per_token=experts.per_token,
        places=address_of(own.places),
        weights=0 if experts.weighted_inputs else address_of(own.weights),
        shared=address_of(shared),
        shared_stride=own.shared.strides[0],
        shared_logits=address_of(logits),
        shared_logits_stride=own.shared_logits.strides[0],
        target=address_of(target),
        target_stride=target.strides[0],
        width=writer.model.width,
        adds=adds,
        scale=scale,
    )
    writer.add(combine, rows)


def _take_linear(
    writer: ProgramWriter,
    weights: LinearWeights,
    source: np.ndarray,
    target: np.ndarray,
    rows: Rows,
) -> None:
    """Apply a linear layer to float32 rows."""
    kind = weights.takes
    x = writer.buffers.x.view(kind)
    writer.copy(source, x, kind, rows, width=writer.model.width)
    writer.linear(weights, x, target, rows=rows)


def _route(experts: Experts, own: ExpertBuffers) -> Route:
    return Route(
        logits=address_of(own.logits),
        stride=own.logits.strides[0],
        experts=experts.count,
        per_token=experts.per_token,
        sigmoid=experts.scoring == "sigmoid",
        normalised=experts.normalised,
        scale=experts.routed_scale,
        chosen=address_of(own.chosen),
        weights=address_of(own.weights),
    )


def _group(experts: Experts, own: ExpertBuffers, held: range) -> Group:
    return Group(
        chosen=address_of(own.chosen),
        per_token=experts.per_token,
        first=held.start,
        held=len(held),
        counts=address_of(own.counts),
        work=address_of(own.work),
        tokens=address_of(own.tokens),
        places=address_of(own.places),
    )


def _run_experts(
    writer: ProgramWriter, mixture: MixtureWeights, source: np.ndarray, rows: Rows
) -> None:
    own = writer.buffers.experts
    experts = writer.spec.experts
    assert own is not None
    assert experts is not None
    kind = mixture.up.takes
    x = own.x.view(kind)
    scales = own.weights if experts.weighted_inputs else None
    gather = _gather(experts, source, x, kind, writer.model.width, own.tokens, scales)
    writer.add(gather, rows)
    down_kind = mixture.down.takes
    middle_format = Format.F32 if down_kind is Format.INT8 else down_kind
    middle = own.middle.view(middle_format)
    is_clamped = writer.spec.clamped_gate is not None
    gate = Epilogue.CLAMPED_GATE if is_clamped else Epilogue.GATE
    up = _linear(writer.spec, mixture.up, own, x, middle, gate, middle_format)
    writer.add(up, rows)
    if middle_format is not down_kind:
        rounded = own.middle_x.view(down_kind)
        width = mixture.down.inputs
        writer.add(_gather(experts, middle, rounded, down_kind, width, None, None), rows)
        middle = rounded
    down = _linear(writer.spec, mixture.down, own, middle, own.outputs, Epilogue.STORE, Format.F32)
    writer.add(down, rows)


def _gather(
    experts: Experts,
    source: np.ndarray,
    target: np.ndarray,
    kind: Format,
    width: int,
    tokens: np.ndarray | None,
    weights: np.ndarray | None,
) -> Gather:
    """tokens: of each row, its pair; None: row i is written to row i"""
    return Gather(
        source=address_of(source),
        source_stride=source.strides[0],
        target=address_of(target),
        target_stride=target.strides[0],
        format=kind,
        width=width,
        per_token=experts.per_token,
        tokens=address_of(tokens),
        weights=address_of(weights),
    )


def _linear(
    spec: ModelSpec,
    weights: ExpertWeights,
    own: ExpertBuffers,
    x: np.ndarray,
    target: np.ndarray,
    epilogue: Epilogue,
    kind: Format,
) -> ExpertLinear:
    bounds = spec.clamped_gate
    return ExpertLinear(
        weights=0,
        weight_format=0,
        block_bytes=0,
        blocks=weights.outputs // BLOCK,
        inputs=weights.inputs,
        x=address_of(x),
        x_stride=x.strides[0],
        x_own=0,
        target=address_of(target),
        target_stride=target.strides[0],
        epilogue=epilogue,
        bias=address_of(weights.bias),
        format=kind,
        activation=ACTIVATIONS.index(spec.activation),
        second=0,
        exact=weights.exact,
        scale=1.0 if bounds is None else bounds.alpha,
        limit=0.0 if bounds is None else bounds.limit,
        table=address_of(weights.table),
        work=address_of(own.work),
    )


def _run_shared(
    writer: ProgramWriter,
    up: LinearWeights,
    down: LinearWeights,
    source: np.ndarray,
    rows: Rows,
) -> None:
    """Write the expert that all tokens take."""
    buffers = writer.buffers
    assert buffers.experts is not None
    kind = up.takes
    x = buffers.x.view(kind)
    writer.copy(source, x, kind, rows, width=writer.model.width)
    middle_format = Format.F32 if down.takes is Format.INT8 else down.takes
    middle = buffers.middle.view(middle_format)
    writer.linear(up, x, middle, Epilogue.GATE, rows, kind=middle_format)
    if middle_format is not down.takes:
        rounded = buffers.middle_x.view(down.takes)
        writer.copy(middle, rounded, down.takes, rows, width=down.inputs)
        middle = rounded
    writer.linear(down, middle, buffers.experts.shared, rows=rows)
