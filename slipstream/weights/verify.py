"""Compare what an engine computes, layer by layer, with another model of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from slipstream.kernels.attention import plan_attention
from slipstream.model.transformer import Layer, Step, Transformer
from slipstream.weights.engine_folder import read_engine_folder

_BLOCK = 16
# Relative distance from which a layer counts as different. Rounding to 16 bits stays well below.
DIVERGED = 0.05


class Trace(NamedTuple):
    """The normalised input of each layer and the logits, for one sequence."""

    layer_inputs: list[torch.Tensor]  # one [tokens, hidden] per layer
    logits: torch.Tensor  # [tokens, vocab]


@dataclass(frozen=True)
class Comparison:
    tokens: int
    same_choice: int  # number of positions at which both have the same most likely token
    largest_difference: float  # largest absolute difference of two logits
    first_diverging_layer: int | None

    @property
    def agreement(self) -> float:
        return self.same_choice / self.tokens


def trace_engine(path: Path, sequences: Sequence[Sequence[int]]) -> list[Trace]:
    """Run sequences through an engine's weights in float32 on the CPU, and return their traces."""
    folder = read_engine_folder(path)
    longest = max(map(len, sequences))
    tensors = folder.tensors(dtype=torch.float32)
    model = Transformer(folder.spec, tensors, torch.float32, torch.device("cpu"), positions=longest)
    seen: list[torch.Tensor] = []
    for layer in model.layers:
        _record_inputs(layer, seen)
    traces = []
    with torch.inference_mode():
        for sequence in sequences:
            seen.clear()
            logits = _run(model, sequence)
            traces.append(Trace(list(seen), logits))
    return traces


def _record_inputs(layer: Layer, seen: list[torch.Tensor]) -> None:
    attention = layer.attention

    def record(x: torch.Tensor, *others: object) -> torch.Tensor:
        seen.append(x.clone())
        return attention(x, *others)  # type: ignore[arg-type]

    layer.attention = record  # type: ignore[method-assign, assignment]


def _run(model: Transformer, sequence: Sequence[int]) -> torch.Tensor:
    count = len(sequence)
    blocks = -(-len(sequence) // _BLOCK)
    cache = model.new_cache((blocks + 1) * _BLOCK)
    tables = numpy.arange(1, blocks + 1, dtype=numpy.int32)[None]
    attention = plan_attention(tables, numpy.array([0]), numpy.array([count]), _BLOCK, cache)
    slots = torch.arange(_BLOCK, _BLOCK + count)
    return model(
        Step(torch.tensor(sequence), torch.arange(count), slots, attention, samples=None), cache
    )


def compare(ours: Sequence[Trace], theirs: Sequence[Trace]) -> Comparison:
    tokens = same = 0
    largest = 0.0
    diverging: list[int] = []
    for one, other in zip(ours, theirs, strict=True):
        tokens += len(one.logits)
        same += int((one.logits.argmax(-1) == other.logits.argmax(-1)).sum())
        largest = max(largest, float((one.logits - other.logits).abs().max()))
        diverging += _first_diverging(one, other)
    return Comparison(tokens, same, largest, min(diverging) if diverging else None)


def _first_diverging(one: Trace, other: Trace) -> list[int]:
    """Return a list with the first layer whose result differs, or an empty list.

    Layer -1 is the embedding.
    """
    stages = [*zip(one.layer_inputs, other.layer_inputs, strict=True), (one.logits, other.logits)]
    for stage, (mine, reference) in enumerate(stages):
        if float((mine - reference).norm()) > DIVERGED * float(reference.norm()):
            return [stage - 1]
    return []
