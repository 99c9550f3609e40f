"""Switches for the kernels' optimisations, for debugging: each can be turned off by itself.

With a switch off, the plain path computes the same thing more slowly. No torch here: the server,
which has none, writes these options.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelOptions:
    # keep 12-bit copies of bf16 weights for steps of few tokens (kernels/bf12.py)
    compressed_weights: bool = True
    # keep bf16 keys and values in 12 bits (kernels/packed_cache.py)
    compressed_kv_cache: bool = True
    # one kernel for GEMV, residual addition and norm, in steps of one token (kernels/gpu/gemv.py)
    fused_gemv: bool = True
    # CUDA graphs of steps that mix decodes with a few prompt tokens (engine/gpu/mixed_graphs.py)
    mixed_graphs: bool = True
    # results that do not depend on the other requests of a step: Linear.batch_invariant and
    # kernels/invariant_attention.py
    deterministic: bool = False
