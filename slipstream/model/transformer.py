"""The one transformer that every family is a set of options of. Only mathematics: no requests, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import linear
from slipstream.kernels.activation import ACTIVATIONS, gated
from slipstream.kernels.attention import cache_shape
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.operations import Attention, Operations, operations_on
from slipstream.model.linear import Tensors
from slipstream.model.position import rotary_table
from slipstream.model.spec import ModelSpec

_SHARPENED = 32  # tokens whose logits are computed again; more than can tie at the top


@dataclass(slots=True)
class Step:
    """What one forward pass computes."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]: where their keys and values go
    attention: Attention
    samples: Tensor | None  # [samples]: the tokens whose logits are wanted; None: all


class Transformer:
    def __init__(
        self, spec: ModelSpec, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device, positions: int
    ) -> None:
        """`positions`: how long a sequence may become; learned positions cannot go beyond their table."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self.operations = operations_on(device)
        source = Tensors(tensors, dtype, device)
        self.embedding = source.take("transformer.vocab_embedding.weight", (spec.vocab_size, spec.hidden_size))
        self.position_embedding: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            self.position_embedding = source.take("transformer.position_embedding.weight", shape)
        else:
            cosine, sine = rotary_table(spec, positions)
            self.rotary = (cosine.to(device), sine.to(device))
        self.layers = [Layer(spec, index, source, self.operations) for index in range(spec.layers)]
        self.final_norm = _norm(spec, source, "transformer.ln_f")
        self.head = Head(spec, source, self.embedding)
        source.close()

    def new_cache(self, slots: int) -> Tensor:
        """Keys and values of all layers, in the layout that attention wants."""
        shape = cache_shape(self.spec.layers, slots, self.spec.kv_heads, self.spec.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(self, step: Step, cache: Tensor) -> Tensor:
        """cache: [layers, 2, kv_heads, slots, head_size] → logits [samples, vocab], float32 on CPU."""
        # The residual stream stays in float32: in bf16 every addition to it would round away what layers add.
        hidden = functional.embedding(step.token_ids, self.embedding).float()
        if self.position_embedding is not None:
            hidden += functional.embedding(step.positions, self.position_embedding)
        add_norm, turn = self.operations.add_norm, None
        if self.rotary is not None:
            turn = self.operations.turn_at(*self.rotary, step.positions, self.dtype)
        delta: Tensor | None = None
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            delta = layer.attention(add_norm(hidden, delta, layer.input_norm), step, turn, layer_cache)
            delta = layer.mlp(add_norm(hidden, delta, layer.post_norm))
        if step.samples is not None:
            hidden, delta = hidden[step.samples], delta[step.samples] if delta is not None else None
        return self.head(add_norm(hidden, delta, self.final_norm))


class Head:
    """From normalised hidden states [samples, hidden] to logits [samples, vocab]."""

    def __init__(self, spec: ModelSpec, source: Tensors, embedding: Tensor) -> None:
        self.rows: Tensor | None = None  # [vocab, hidden], where products come out rounded to 16 bits
        if spec.tied_embeddings:  # a quantised engine holds a head of its own all the same
            self.rows = embedding
        else:
            self.rows = source.peek("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        if spec.tied_embeddings and not source.has("lm_head.weight"):
            self.product = linear.dense(embedding, None)
        else:
            self.product = source.product("lm_head", spec.vocab_size, spec.hidden_size, False)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.product(x)
        if x.device.type != "cpu":
            return logits  # widened where they are sampled, without a pass over all of them
        logits = logits.float()
        return logits if x.dtype == torch.float32 or self.rows is None else sharpen(logits, x, self.rows)


def sharpen(logits: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Compute the likeliest tokens' logits again in float32: logits [samples, vocab], x [samples, hidden].

    A 16-bit logit near 16 is a multiple of 1/16, so that the best tokens tie or trade places. What matters is
    decided among few of them, and few rows of the weight cost next to nothing to read again.
    """
    best = logits.topk(min(_SHARPENED, logits.shape[-1]), dim=-1).indices  # [samples, n]
    exact = torch.bmm(rows[best].float(), x.float()[:, :, None])[:, :, 0]
    return logits.scatter_(1, best, exact)


class Layer:
    def __init__(self, spec: ModelSpec, index: int, source: Tensors, operations: Operations) -> None:
        self.spec, self.operations = spec, operations
        self.rule = AttentionRule(spec.head_size**-0.5, spec.window_of_layer(index))
        name = f"transformer.layers.{index}"
        self.input_norm = _norm(spec, source, f"{name}.input_layernorm")
        self.qkv = source.product(f"{name}.attention.qkv", spec.qkv_size, spec.hidden_size, spec.qkv_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = source.take(f"{name}.attention.q_layernorm.weight", (spec.head_size,))
            self.k_norm = source.take(f"{name}.attention.k_layernorm.weight", (spec.head_size,))
        self.dense = source.product(f"{name}.attention.dense", spec.hidden_size, spec.q_size, spec.dense_bias)
        self.post_norm = _norm(spec, source, f"{name}.post_layernorm")
        rows = 2 * spec.ffn_size if spec.gated_mlp else spec.ffn_size
        first = "gate_up" if spec.gated_mlp else "fc"
        self.first = source.product(f"{name}.mlp.{first}", rows, spec.hidden_size, spec.mlp_bias)
        self.proj = source.product(f"{name}.mlp.proj", spec.hidden_size, spec.ffn_size, spec.mlp_bias)

    def attention(self, x: Tensor, step: Step, turn: tuple[Tensor, Tensor] | None, cache: Tensor) -> Tensor:
        """x: [tokens, hidden]; cache: [2, kv_heads, slots, head_size] → [tokens, hidden]"""
        spec = self.spec
        keys, values = cache.unbind()
        heads = self.qkv(x).view(-1, spec.heads + 2 * spec.kv_heads, spec.head_size)
        q = self.operations.rotate_write(
            heads, step.positions, step.slots, turn, self.q_norm, self.k_norm, spec.norm_epsilon, keys, values
        )
        return self.dense(step.attention.attend(q, keys, values, self.rule).view(-1, spec.q_size))

    def mlp(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] → [tokens, hidden]"""
        x, spec = self.first(x), self.spec
        if not spec.gated_mlp:
            return self.proj(ACTIVATIONS[spec.activation](x))
        if spec.activation == "silu":
            return self.proj(self.operations.silu_gated(x))
        return self.proj(gated(x, ACTIVATIONS[spec.activation]))


def _norm(spec: ModelSpec, source: Tensors, name: str) -> Norm:
    weight = source.take(f"{name}.weight", (spec.hidden_size,))
    bias = source.take(f"{name}.bias", (spec.hidden_size,)) if spec.norm == "layer" else None
    return Norm(weight, bias, spec.norm_epsilon)
