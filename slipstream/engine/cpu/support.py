"""Which models run on the compiled CPU path, and why others do not."""

from __future__ import annotations

from dataclasses import fields

from slipstream.kernels.cpu.layout import LANES, MAX_GROUP, MAX_HEAD_SIZE
from slipstream.model.spec import ModelSpec

DTYPES = ("float32", "bfloat16")


# options that the compiled path does not know → what they mean where they are not the default
_OTHER_OPTIONS = {
    "alibi": "scores have position biases",
    "attention_chunk": "attention is in chunks",
    "causal": "attention goes in both directions",
    "embedding_norm": "embeddings are normalised",
    "input_norms": "attention and MLP take the residual stream as it is",
    "latent": "keys and values come from latent vectors",
    "logit_scale": "logits are scaled",
    "norm_bias": "layer norms have no bias",
    "norm_weights": "norms have no weights",
    "qk_norm_bias": "norms of queries and keys have a bias",
    "qk_norm_kind": "norms of queries and keys have weights of their own for each head, or none",
    "qkv_clip": "queries, keys and values are bounded",
    "query_scaling": "queries are scaled by position",
    "residual_scale": "what layers add is scaled",
    "rotated_layers": "some layers have no RoPE",
    "scale_by_layer": "the scale of the scores differs between layers",
    "sink_logits": "heads have sink logits",
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
    if spec.experts is not None:
        return "the model has experts"
    if spec.norms_after:
        return "norms follow the residual addition"
    if spec.embedding_size:
        return "embeddings are projected to the hidden size"
    if spec.activation == "relu_squared":
        return "the activation is squared ReLU"
    if spec.qk_norm and spec.norm == "layer":
        return "queries and keys have layer norms"
    for field in fields(spec):
        if field.name in _OTHER_OPTIONS and getattr(spec, field.name) != field.default:
            return _OTHER_OPTIONS[field.name]
    return ""
