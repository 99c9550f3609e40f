"""The operations in front of the layers and behind them: embeddings and the output layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.engine.cpu.attention_program import address_of
from slipstream.engine.cpu.buffers import PART
from slipstream.engine.cpu.layer_weights import LinearWeights
from slipstream.kernels.cpu.operations import (
    Embed,
    Format,
    Likeliest,
    Refine,
    Rows,
    Softcap,
    TableFormat,
)

if TYPE_CHECKING:
    from slipstream.engine.cpu.program import ProgramWriter

# Several times what quantised weights shift a logit by.
_REFINED_MARGIN = 3.0


def write_embedding(writer: ProgramWriter) -> None:
    """Write the residual stream in front of the first layer."""
    model = writer.model
    table = model.embedding
    hidden = writer.buffers.hidden
    embed = Embed(
        target=address_of(hidden),
        target_stride=hidden.strides[0],
        table=table.address,
        table_format=table.format,
        size=writer.spec.hidden_size,
        block_bytes=table.stride,
        scale=model.embedding_scale,
        positions=address_of(model.learned_positions),
    )
    if model.project_in is not None:
        _look_up_and_project(writer, embed, model.project_in)
        embed = replace(embed, table_format=TableFormat.NONE)
    writer.add(embed)
    if model.embedding_norm is not None:
        writer.norm(model.embedding_norm, hidden, hidden, Format.F32, shared=True)


def _look_up_and_project(writer: ProgramWriter, embed: Embed, project_in: LinearWeights) -> None:
    """Write projected embeddings of another size to the residual stream."""
    small = writer.buffers.projected
    writer.add(
        replace(
            embed,
            target=address_of(small),
            target_stride=small.strides[0],
            size=writer.spec.embedding_size,
            scale=1.0,
            positions=0,
            takes_given=0,
        )
    )
    x = writer.buffers.x.view(project_in.takes)
    writer.copy(small, x, project_in.takes, Rows.TOKENS, alone=True)
    writer.linear(project_in, x, writer.buffers.hidden, own=True)


def write_head(writer: ProgramWriter, gather: bool) -> None:
    """Write the final states, the logits and the likeliest tokens. gather: the rows with logits are
    among those of all tokens
    """
    model = writer.model
    buffers = writer.buffers
    spec = writer.spec
    source = buffers.hidden if gather else buffers.chosen
    kind = model.head.takes
    states = buffers.states.view(kind)
    final_norm = model.final_norm
    if model.project_out is not None:
        source = _project_out(writer, model.project_out, source, gather)
        gather = False
        final_norm = None
    for target, form in ((buffers.float_states, Format.F32), (states, kind)):
        is_shared = form is Format.F32 and target is buffers.float_states
        if final_norm is None:
            writer.copy(source, target, form, Rows.SAMPLES, gather, not is_shared)
            continue
        flags = {"gather": gather, "shared": is_shared}
        writer.norm(final_norm, source, target, form, Rows.SAMPLES, **flags)
    writer.linear(model.head, states, None, rows=Rows.LOGITS, own=True)
    stride = model.head.outputs * 4
    _refine(writer, stride)
    if spec.final_softcap or spec.logit_scale != 1.0:
        width = model.head.outputs
        bound = Softcap(0, stride, width, spec.final_softcap, spec.logit_scale)
        writer.add(bound, Rows.LOGITS)
    writer.add(
        Likeliest(
            stride=stride,
            vocabulary=len(model.vocabulary),
            part=PART,
            parts=buffers.parts,
            tokens=address_of(buffers.best_tokens),
            logits=address_of(buffers.best_logits),
        ),
        Rows.LOGITS,
    )


def _project_out(
    writer: ProgramWriter, weights: LinearWeights, source: np.ndarray, gather: bool
) -> np.ndarray:
    """Return the final states in the size of the embeddings, which the head takes."""
    kind = weights.takes
    x = writer.buffers.x.view(kind)
    norm = writer.model.final_norm
    if norm is None:
        writer.copy(source, x, kind, Rows.SAMPLES, gather, alone=True)
    else:
        writer.norm(norm, source, x, kind, Rows.SAMPLES, gather=gather)
    writer.linear(weights, x, writer.buffers.projected, rows=Rows.SAMPLES, own=True)
    return writer.buffers.projected


def _refine(writer: ProgramWriter, stride: int) -> None:
    """Compute the largest logits again if there are weights that are not quantised."""
    if not writer.model.refines:
        return
    table = writer.model.embedding
    states = writer.buffers.float_states
    operation = Refine(
        stride=stride,
        vocabulary=len(writer.model.vocabulary),
        states=address_of(states),
        states_stride=states.strides[0],
        table=table.address + writer.model.vocabulary.start * table.stride,
        table_format=table.format,
        row_bytes=table.stride,
        size=writer.spec.embedding_width,
        bias=address_of(writer.model.head.bias),
        margin=_REFINED_MARGIN,
    )
    writer.add(operation, Rows.LOGITS)
