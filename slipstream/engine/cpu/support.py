"""Which models run on the compiled CPU path, and why others do not."""

from __future__ import annotations

from slipstream.kernels.cpu.layout import LANES, MOST_GROUP, MOST_HEAD_SIZE
from slipstream.model.spec import ModelSpec

DTYPES = ("float32", "bfloat16")


def unsupported(spec: ModelSpec, dtype: str, ranks: int) -> str:
    """Return why the compiled path cannot run this model; empty: it can."""
    if ranks > 1:
        return f"the model is divided among {ranks} ranks"
    if dtype not in DTYPES:
        return f"activations are {dtype}"
    if spec.head_size % LANES or spec.head_size > MOST_HEAD_SIZE:
        return (
            f"heads have {spec.head_size} elements, not a multiple of {LANES} up to "
            f"{MOST_HEAD_SIZE}"
        )
    if spec.heads // spec.kv_heads > MOST_GROUP:
        return f"{spec.heads // spec.kv_heads} query heads share a KV head"
    if spec.experts is not None:
        return "the model has experts"
    if spec.norms_after:
        return "norms follow the residual addition"
    if spec.embedding_size:
        return "embeddings are projected to the hidden size"
    return ""
