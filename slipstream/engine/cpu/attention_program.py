"""The operations of a layer's attention: changes of the heads, RoPE, attention and merging."""

from __future__ import annotations

import numpy as np

from slipstream.engine.cpu.buffers import Buffers, Cache
from slipstream.engine.cpu.layer_weights import HeadNorms, LayerWeights
from slipstream.engine.cpu.model import CpuModel
from slipstream.kernels.cpu.operations import Attention, Format, Heads, Merge, Rope

NO_WINDOW = 2**30  # larger than any position


def address_of(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def heads_operation(
    model: CpuModel,
    buffers: Buffers,
    clip: float,
    norms: HeadNorms | None,
    scales: np.ndarray | None,
) -> Heads:
    """Return the operation that changes queries, keys and values before RoPE."""
    spec = model.spec
    return Heads(
        source=address_of(buffers.qkv),
        source_stride=buffers.qkv.strides[0],
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_size=spec.head_size,
        clip=clip,
        q_weight=0 if norms is None else address_of(norms.q_weight),
        q_bias=0 if norms is None else address_of(norms.q_bias),
        k_weight=0 if norms is None else address_of(norms.k_weight),
        k_bias=0 if norms is None else address_of(norms.k_bias),
        layer=spec.norm == "layer",
        together=norms is not None and norms.together,
        epsilon=spec.norm_epsilon,
        scales=address_of(scales),
    )


def attention_operations(
    model: CpuModel, buffers: Buffers, cache: Cache, index: int, layer: LayerWeights
) -> tuple[Rope, Attention]:
    """Return RoPE, which writes keys and values to the cache, and attention."""
    spec = model.spec
    keys = cache.address + index * cache.layer_bytes
    places = {
        "queries": address_of(buffers.queries),
        "query_stride": buffers.queries.strides[0],
        "format": model.format,
        "keys": keys,
        "values": keys + cache.values_offset,
        "head_stride": cache.head_bytes,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
    }
    cosine, sine = model.rope[layer.theta] if layer.rotates else (None, None)
    rope = Rope(
        source=address_of(buffers.qkv),
        source_stride=buffers.qkv.strides[0],
        cosine=address_of(cosine),
        sine=address_of(sine),
        half=model.half,
        q_norm=address_of(layer.q_norm),
        k_norm=address_of(layer.k_norm),
        epsilon=spec.norm_epsilon,
        **places,
    )
    rule = layer.rule
    attention = Attention(
        target=address_of(buffers.attended),
        target_stride=buffers.attended.strides[0],
        scale=rule.scale,
        softcap=rule.softcap,
        window=NO_WINDOW if rule.window is None else rule.window,
        sinks=0 if rule.window is None else rule.sinks,
        chunk=rule.chunk or 0,
        slopes=address_of(model.slopes),
        slope_scale=1.0 if rule.slopes is None else rule.slopes.scale,
        slopes_rounded=rule.slopes is not None and rule.slopes.rounded,
        sink_logits=address_of(layer.sink_logits),
        **places,
    )
    return rope, attention


def merge_operation(
    model: CpuModel,
    buffers: Buffers,
    layer: LayerWeights,
    gather: bool,
    target: int,
    target_stride: int,
    target_own: int,
    format: Format,
) -> Merge:
    """Return the operation that merges the results of attention. The last four: its fields"""
    return Merge(
        source=address_of(buffers.attended),
        source_stride=buffers.attended.strides[0],
        gather=gather,
        target=target,
        target_stride=target_stride,
        target_own=target_own,
        format=format,
        width=buffers.attended.shape[1],
        heads=model.spec.heads,
        head_size=model.spec.head_size,
        sink_logits=address_of(layer.sink_logits),
    )
