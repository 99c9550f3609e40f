"""The rules of a layer's heads: which tokens they attend to, and how queries and keys are changed
before. Both torch and compiled code take them. This module does not import torch.
"""

from __future__ import annotations

import numpy as np

from slipstream.kernels.attention_rule import AttentionRule, Slopes
from slipstream.kernels.ranks import Ranks
from slipstream.model.spec import Alibi, ModelSpec, QueryScaling


def norms_in_kernel(spec: ModelSpec, layer: int) -> bool:
    """Return whether the kernel of RoPE normalises a layer's queries and keys."""
    known = spec.norm == "rms" and spec.qk_norm_kind in ("shared", "plain")
    return spec.normalises_qk(layer) and known and not spec.scales_queries(layer)


def attention_rule(spec: ModelSpec, layer: int, ranks: Ranks) -> AttentionRule:
    """Return what a layer's queries attend to, without its sink logits."""
    slopes = None if spec.alibi is None else attention_slopes(spec.alibi, spec.heads, ranks)
    return AttentionRule(
        spec.scale_of_layer(layer),
        spec.window_of_layer(layer),
        softcap=spec.attention_softcap,
        chunk=spec.chunk_of_layer(layer),
        slopes=slopes,
        causal=spec.causal,
        value_size=None if spec.latent is None else spec.latent.kv_rank,
    )


def attention_slopes(alibi: Alibi, heads: int, ranks: Ranks) -> Slopes:
    """Return the slopes of this rank's heads. heads: their number"""
    exponents = _exponents(alibi.largest_exponent, heads * ranks.size)
    own = exponents[ranks.rank * heads : (ranks.rank + 1) * heads]
    return Slopes(tuple(2.0**-exponent for exponent in own), alibi.rounded, alibi.scale)


def _exponents(largest: float, heads: int) -> list[float]:
    """Return the exponents of all heads. Where their number is no power of two: every second one
    of the next power of two, then the others as far as they are needed.
    """
    count = 1 << (heads - 1).bit_length()
    steps = [largest * (index + 1) / count for index in range(count)]
    return steps if count == heads else [*steps[1::2], *steps[::2]][:heads]


def query_scales(scaling: QueryScaling, positions: int) -> np.ndarray:
    """Return the factors of the queries at the first positions: float32 [positions]."""
    intervals = (np.arange(positions) + scaling.offset) // scaling.interval
    scales: np.ndarray = (np.log1p(intervals) * scaling.beta + 1.0).astype(np.float32)
    return scales
