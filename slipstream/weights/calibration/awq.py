"""AWQ: scale up the inputs' columns that matter before rounding, and scale down what makes them.

A factor of a column is exact only where the inputs come from weights that can be divided by it: a
norm's, the values' rows for the output projection, the multiplied half for the down projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.model.spec import ModelSpec
from slipstream.weights.calibration.rounding import output_error, whole_groups
from slipstream.weights.calibration.statistics import InputStatistics

_STEPS = 20  # exponents that are tried
_MOST_ROWS = 1024  # rows that a search looks at


class Fold(NamedTuple):
    """Parameters of a layer whose results can be divided by factors, one for each channel."""

    consumers: tuple[str, ...]  # the linear layers that take the results
    norm: str = ""  # stem of the norm that makes them
    rows_of: str = ""  # or: stem of the linear layer that makes them, from this row on
    first_row: int = 0
    heads: int = 0  # query heads that share a value head; 0: channels are rows


def find_folds(spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor]) -> Iterator[Fold]:
    """Yield the folds of a layer that change no result. tensors: the layer's, by their names"""
    prefix = f"transformer.layers.{layer}."
    dense_mlp = spec.experts_of_layer(layer) is None
    up_proj = f"{prefix}mlp.{'gate_up' if spec.gated_mlp else 'fc'}"
    has_norms = spec.input_norms and spec.norm_weights and not spec.norms_after
    if has_norms and spec.latent is None:
        consumers = [f"{prefix}attention.qkv"]
        if spec.shared_norm and dense_mlp:
            consumers.append(up_proj)
        if dense_mlp or not spec.shared_norm:
            yield Fold(tuple(consumers), norm=f"{prefix}input_layernorm")
    if has_norms and dense_mlp and not spec.shared_norm:
        between = "pre_feedforward_layernorm" if spec.output_norms else "post_layernorm"
        yield Fold((up_proj,), norm=f"{prefix}{between}")
    if spec.latent is None and not spec.qkv_clip:
        yield Fold(
            (f"{prefix}attention.dense",),
            rows_of=f"{prefix}attention.qkv",
            first_row=spec.q_size + spec.kv_size,
            heads=spec.heads // spec.kv_heads,
        )
    if dense_mlp and spec.gated_mlp and spec.clamped_gate is None:
        yield Fold((f"{prefix}mlp.proj",), rows_of=up_proj, first_row=spec.ffn_size)


def apply_folds(
    spec: ModelSpec, layer: int, tensors: dict[str, Tensor], found: dict[str, InputStatistics]
) -> None:
    """Scale the weights of a layer in place, and what was found of their inputs."""
    for fold in find_folds(spec, layer, tensors):
        statistics = found[fold.consumers[0]]
        magnitudes = statistics.magnitudes
        if fold.heads:
            size = spec.head_size
            shared = magnitudes.view(spec.kv_heads, fold.heads, size).mean(1, keepdim=True)
            magnitudes = shared.expand(-1, fold.heads, -1).flatten()
        weight = torch.cat([tensors[f"{name}.weight"] for name in fold.consumers])
        factors = search_factors(weight, magnitudes, statistics.hessian)
        for name in fold.consumers:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * factors
        found.update({name: statistics.divided(factors) for name in fold.consumers})
        _divide(spec, fold, tensors, factors)


def search_factors(weight: Tensor, magnitudes: Tensor, hessian: Tensor) -> Tensor:
    """Return the factors of the columns with the least error of the outputs.

    weight: [rows, columns]; magnitudes: [columns], the mean absolute inputs
    """
    step = -(-len(weight) // _MOST_ROWS)
    weight = weight[::step]
    inputs = magnitudes.clamp(min=1e-6 * float(magnitudes.max()) + 1e-12)
    best = torch.ones_like(inputs)
    least = output_error(whole_groups(weight).round(weight) - weight, hessian)
    for number in range(1, _STEPS):
        factors = inputs ** (number / _STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        scaled = weight * factors
        rounded = whole_groups(scaled).round(scaled) / factors
        error = output_error(rounded - weight, hessian)
        if error < least:
            least = error
            best = factors
    return best


def _divide(spec: ModelSpec, fold: Fold, tensors: dict[str, Tensor], factors: Tensor) -> None:
    if fold.norm:
        offset = spec.norm_offset
        weight = f"{fold.norm}.weight"
        tensors[weight] = (tensors[weight] + offset) / factors - offset
        if f"{fold.norm}.bias" in tensors:
            tensors[f"{fold.norm}.bias"] = tensors[f"{fold.norm}.bias"] / factors
        return
    if fold.heads:
        factors = factors.view(spec.kv_heads, fold.heads, spec.head_size)[:, 0].flatten()
    for name in (f"{fold.rows_of}.weight", f"{fold.rows_of}.bias"):
        if name in tensors:
            divided = tensors[name].clone()
            rows = divided[fold.first_row : fold.first_row + len(factors)]
            rows /= factors.view(-1, *[1] * (divided.dim() - 1))
            tensors[name] = divided
