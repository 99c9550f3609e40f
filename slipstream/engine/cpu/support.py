"""Which models run on the compiled CPU path, and why others do not."""

from __future__ import annotations

from dataclasses import fields

from slipstream.kernels.cpu.layout import LANES, MAX_GROUP, MAX_HEAD_SIZE
from slipstream.model.spec import ModelSpec

DTYPES = ("float32", "bfloat16")


# options that the compiled path does not know → what they mean where they are not the default
_OTHER_OPTIONS = {
    "causal": "attention goes in both directions",
    "latent": "keys and values come from latent vectors",
}


def unsupported(spec: ModelSpec, dtype: str) -> str:
    """Return why the compiled path cannot run this model; empty: it can."""
    if dtype not in DTYPES:
        return f"activations are {dtype}"
    if spec.head_size % LANES or spec.head_size > MAX_HEAD_SIZE:
        return (
            f"heads have {spec.head_size} elements, not a multiple of {LANES} up to {MAX_HEAD_SIZE}"
        )
    if spec.heads // spec.kv_heads > MAX_GROUP:
        return f"{spec.heads // spec.kv_heads} query heads share a KV head"
    if spec.alibi is not None and spec.attention_softcap:
        return "scores have position biases and a bound"
    for field in fields(spec):
        if field.name in _OTHER_OPTIONS and getattr(spec, field.name) != field.default:
            return _OTHER_OPTIONS[field.name]
    return _unsupported_experts(spec)


def _unsupported_experts(spec: ModelSpec) -> str:
    experts = spec.experts
    if experts is None:
        return "" if spec.clamped_gate is None else "the gate of the MLP is bounded"
    if experts.groups > 1 or experts.corrected:
        return "experts are chosen in groups or by corrected scores"
    if spec.parallel_residual or spec.norms_after or not spec.gated_mlp:
        return "experts are beside attention, behind it without a norm, or without a gate"
    if spec.clamped_gate is not None and (experts.layers is not None or experts.shared_ffn_size):
        return "the gate of an MLP beside experts is bounded"
    return ""
