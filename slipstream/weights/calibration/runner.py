"""Run a text through a model one layer at a time, in float32: one layer is in memory at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.attention import plan_attention
from slipstream.kernels.attention_rule import cache_shape
from slipstream.kernels.operations import operations_on
from slipstream.model.linear import Tensors
from slipstream.model.position import rotary_table
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Layer, RopeTables, Step, Transformer
from slipstream.weights.calibration.statistics import InputStatistics, ObservedLinear
from slipstream.weights.parameters import Quantisation, engine_parameters
from slipstream.weights.sources.source import Source
from slipstream.weights.stream import parameter_rows

_BLOCK = 16  # slots of a block of the cache
_CPU = torch.device("cpu")


class LayerRunner:
    """The residual stream of a text before the next layer."""

    def __init__(self, source: Source, windows: Sequence[Sequence[int]]) -> None:
        """windows: the tokens of the text, in sequences that are run on their own"""
        self.spec = source.spec
        self._operations = operations_on(_CPU)
        self._longest = max(map(len, windows))
        self._blocks = -(-self._longest // _BLOCK)
        shape = cache_shape(
            1,
            (self._blocks + 1) * _BLOCK,
            self.spec.kv_heads,
            self.spec.head_size,
            self.spec.cached_vectors,
        )
        self._cache = torch.zeros(shape)[0]
        self._steps = [self._step(window) for window in windows]
        self._hidden = self._embed(source)

    def run(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        observed: Mapping[str, InputStatistics] | None = None,
    ) -> list[Tensor]:
        """Return the residual stream behind a layer with these weights.

        observed: statistics that are added to, by the name of a linear layer
        """
        layer = Layer(self.spec, index, self._tensors(tensors), self._operations)
        if observed:
            _observe(layer, index, observed)
        rope = self._rope(layer)
        with torch.inference_mode():
            return [
                self._run_window(layer, step, hidden, rope)
                for step, hidden in zip(self._steps, self._hidden, strict=True)
            ]

    def advance(self, hidden: list[Tensor]) -> None:
        """Go on to the next layer with this residual stream."""
        self._hidden = hidden

    def _run_window(
        self, layer: Layer, step: Step, hidden: Tensor, rope: RopeTables | None
    ) -> Tensor:
        hidden = hidden.clone()
        x: Tensor = hidden
        if layer.input_norm is not None and not self.spec.norms_after:
            x = self._operations.normalise(hidden, layer.input_norm)
        own = None if rope is None else (rope[0][: len(hidden)], rope[1][: len(hidden)])
        found, _ = layer(hidden, x, step, own, self._cache, None)
        return found

    def _step(self, window: Sequence[int]) -> Step:
        count = len(window)
        tables = np.arange(1, self._blocks + 1, dtype=np.int32)[None]
        cache = self._cache[None]
        attention = plan_attention(tables, np.array([0]), np.array([count]), _BLOCK, cache)
        positions = torch.arange(count)
        return Step(torch.tensor(window), positions, _BLOCK + positions, attention, samples=None)

    def _rope(self, layer: Layer) -> RopeTables | None:
        if not layer.rotates:
            return None
        tables = rotary_table(self.spec, self._longest, layer.theta)
        cosine, sine = map(torch.from_numpy, tables)
        positions = torch.arange(self._longest)
        return self._operations.rope_at(cosine, sine, positions, torch.float32)

    def _embed(self, source: Source) -> list[Tensor]:
        """Return the residual stream before the first layer."""
        first = first_layer_spec(self.spec)
        tensors = {
            parameter.name: _read(source, parameter.parts)
            for parameter in engine_parameters(first, Quantisation())
        }
        model = Transformer(first, tensors, torch.float32, _CPU, self._longest)
        with torch.inference_mode():
            return [model.embed(step) for step in self._steps]

    def _tensors(self, tensors: Mapping[str, Tensor]) -> Tensors:
        return Tensors(dict(tensors), torch.float32, _CPU)


def first_layer_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the first layer alone, with the embedding as its output layer."""
    experts = spec.experts
    if experts is not None and experts.layers is not None:
        experts = replace(experts, layers=experts.layers[:1])
    return replace(
        spec,
        layers=1,
        sliding_layers=spec.sliding_layers and spec.sliding_layers[:1],
        rotated_layers=spec.rotated_layers and spec.rotated_layers[:1],
        experts=experts,
        tied_embeddings=True,
        head_bias=False,
        labels=0,
        score_dense=False,
    )


def read_layer(source: Source, index: int) -> dict[str, Tensor]:
    """Return the float32 tensors of a layer, by the names that an engine uses."""
    prefix = f"transformer.layers.{index}."
    return {
        parameter.name: _read(source, parameter.parts)
        for parameter in engine_parameters(source.spec, Quantisation())
        if parameter.name.startswith(prefix)
    }


def _read(source: Source, parts: tuple[str, ...]) -> Tensor:
    return torch.cat([rows.float() for rows in parameter_rows(source, parts)])


def _observe(layer: Layer, index: int, observed: Mapping[str, InputStatistics]) -> None:
    """Count the inputs of the linear layers that every token takes."""
    prefix = f"transformer.layers.{index}."
    layer.o_proj = ObservedLinear(layer.o_proj, observed[f"{prefix}attention.dense"])
    if layer.latent is None:
        layer.qkv = ObservedLinear(layer.qkv, observed[f"{prefix}attention.qkv"])
    if layer.mixture is None:
        up_proj = "gate_up" if layer.spec.gated_mlp else "fc"
        layer.gated = None  # it would not call the layer
        layer.up_proj = ObservedLinear(layer.up_proj, observed[f"{prefix}mlp.{up_proj}"])
        layer.down_proj = ObservedLinear(layer.down_proj, observed[f"{prefix}mlp.proj"])
