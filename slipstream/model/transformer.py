"""The one transformer that every family is a set of options of. Only mathematics: no requests, no blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import linear
from slipstream.kernels.activation import ACTIVATIONS, gated
from slipstream.kernels.attention import AttentionPlan, attend, cache_shape, write_cache
from slipstream.kernels.normalisation import layer_norm, rms_norm
from slipstream.kernels.rotary import rotate
from slipstream.model.linear import Tensors
from slipstream.model.position import rotary_table
from slipstream.model.spec import ModelSpec


_SHARPENED = 32  # tokens whose logits are computed again; more than can tie at the top


@dataclass(slots=True)
class Step:
    """What one forward pass computes."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    attention: AttentionPlan
    samples: Tensor  # [samples]: the tokens whose logits are wanted


class Transformer:
    def __init__(
        self, spec: ModelSpec, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device, positions: int
    ) -> None:
        """`positions`: how long a sequence may become; learned positions cannot go beyond their table."""
        self.spec, self.dtype, self.device = spec, dtype, device
        source = Tensors(tensors, dtype, device)
        self.embedding = source.take("transformer.vocab_embedding.weight", (spec.vocab_size, spec.hidden_size))
        self.position_embedding: Tensor | None = None
        self.cosine = self.signed_sine = torch.empty(0)
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            self.position_embedding = source.take("transformer.position_embedding.weight", shape)
        else:
            cosine, sine = rotary_table(spec, positions)
            self.cosine, self.signed_sine = (t.to(device=device, dtype=dtype)[:, None, :] for t in (cosine, sine))
        self.layers = [Layer(spec, index, source) for index in range(spec.layers)]
        self.final_norm = _norm(spec, source, "transformer.ln_f")
        self.head = Head(spec, source, self.embedding)
        source.close()

    def new_cache(self, slots: int) -> Tensor:
        """Keys and values of all layers, in the layout that attention wants."""
        shape = cache_shape(self.spec.layers, slots, self.spec.kv_heads, self.spec.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(self, step: Step, cache: Tensor) -> Tensor:
        """cache: [layers, 2, kv_heads, slots, head_size] → logits [samples, vocab] in float32."""
        # The residual stream stays in float32: in bf16 every addition to it would round away what layers add.
        hidden = functional.embedding(step.token_ids, self.embedding).float()
        turn: tuple[Tensor, Tensor] | None = None
        if self.position_embedding is not None:
            hidden = hidden + functional.embedding(step.positions, self.position_embedding)
        else:
            turn = (self.cosine[step.positions], self.signed_sine[step.positions])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, turn, layer_cache, step.attention)
        return self.head(self.final_norm(hidden[step.samples]))


class Head:
    """From normalised hidden states [samples, hidden] to logits [samples, vocab] in float32."""

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
        logits = self.product(x).float()
        if x.dtype == torch.float32 or self.rows is None or x.device.type != "cpu":
            return logits
        return sharpen(logits, x, self.rows)


def sharpen(logits: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Compute the likeliest tokens' logits again in float32: logits [samples, vocab], x [samples, hidden].

    A 16-bit logit near 16 is a multiple of 1/16, so that the best tokens tie or trade places. What matters is
    decided among few of them, and few rows of the weight cost next to nothing to read again.
    """
    best = logits.topk(min(_SHARPENED, logits.shape[-1]), dim=-1).indices  # [samples, n]
    exact = torch.bmm(rows[best].float(), x.float()[:, :, None])[:, :, 0]
    return logits.scatter_(1, best, exact)


class Layer:
    def __init__(self, spec: ModelSpec, index: int, source: Tensors) -> None:
        self.spec = spec
        self.window = spec.window_of_layer(index)
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
        self.activation = ACTIVATIONS[spec.activation]

    def __call__(
        self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), turn, cache, plan)
        return hidden + self.mlp(self.post_norm(hidden))

    def attention(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """x: [tokens, hidden]; cache: [2, kv_heads, slots, head_size] → [tokens, hidden]"""
        spec = self.spec
        heads = self.qkv(x).view(-1, spec.heads + 2 * spec.kv_heads, spec.head_size)
        qk, v = heads[:, : spec.heads + spec.kv_heads], heads[:, spec.heads + spec.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(qk[:, : spec.heads], self.q_norm, spec.norm_epsilon)
            k = rms_norm(qk[:, spec.heads :], self.k_norm, spec.norm_epsilon)
            qk = torch.cat((q, k), dim=1)
        if turn is not None:
            qk = rotate(qk, *turn)
        q, k = qk[:, : spec.heads], qk[:, spec.heads :]
        write_cache(cache[0], cache[1], k, v, plan.slots)
        out = attend(q, k, v, cache[0], cache[1], plan, self.window)
        return self.dense(out.view(-1, spec.q_size))

    def mlp(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.proj(gated(x, self.activation) if self.spec.gated_mlp else self.activation(x))


def _norm(spec: ModelSpec, source: Tensors, name: str) -> Callable[[Tensor], Tensor]:
    weight = source.take(f"{name}.weight", (spec.hidden_size,))
    if spec.norm == "rms":
        return lambda x: rms_norm(x, weight, spec.norm_epsilon)
    bias = source.take(f"{name}.bias", (spec.hidden_size,))
    return lambda x: layer_norm(x, weight, bias, spec.norm_epsilon)
