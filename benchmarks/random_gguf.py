"""GGUF files of random weights in the shapes of known models, for comparisons with llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType, quants


@dataclass(frozen=True)
class Shape:
    """The sizes of a model with tied embeddings."""

    architecture: str  # "llama", or "qwen2" with biases of q, k and v
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    positions: int = 2048


SHAPES = {
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 8192, 128_256),
    "qwen2-0.5b": Shape("qwen2", 896, 24, 14, 2, 4864, 151_936),
    "tiny": Shape("llama", 64, 2, 4, 2, 96, 512),
    "tiny-qwen2": Shape("qwen2", 64, 2, 4, 2, 96, 512),
}


def write_random_gguf(shape: Shape, kind: Kind, target: Path) -> Path:
    """Write the file if there is none, and return it. Matrices have type `kind`."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_suffix(".part")
    writer = GGUFWriter(staging, shape.architecture)
    _write_metadata(writer, shape)
    chance = np.random.default_rng(0)
    for name, size in _tensors(shape):
        values = chance.standard_normal(size, dtype=np.float32)
        if len(size) == 1:
            norm = name.endswith("norm.weight")
            values = 1 + values / 10 if norm else values / 10
            writer.add_tensor(name, values)
            continue
        values *= np.float32(size[1] ** -0.5)
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return staging.rename(target)


def _write_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    tokens = [f"t{number}" for number in range(shape.vocabulary)]
    tokens[:4] = ["t", "1", "t1", "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * 3 + [TokenType.CONTROL] * (len(tokens) - 3))
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(3)
    writer.add_bos_token_id(3)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = shape.hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        yield f"{prefix}attn_norm.weight", (shape.hidden,)
        for part, rows in (("q", shape.hidden), ("k", kv), ("v", kv)):
            yield f"{prefix}attn_{part}.weight", (rows, shape.hidden)
            if shape.architecture == "qwen2":
                yield f"{prefix}attn_{part}.bias", (rows,)
        yield f"{prefix}attn_output.weight", (shape.hidden, shape.hidden)
        yield f"{prefix}ffn_norm.weight", (shape.hidden,)
        yield f"{prefix}ffn_gate.weight", (shape.ffn, shape.hidden)
        yield f"{prefix}ffn_up.weight", (shape.ffn, shape.hidden)
        yield f"{prefix}ffn_down.weight", (shape.hidden, shape.ffn)
    yield "output_norm.weight", (shape.hidden,)
