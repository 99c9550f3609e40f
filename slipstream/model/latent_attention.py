"""Multi-head latent attention in its absorbed form: a token's latent vector and the rotated key
beside it are the only key of all heads, and the latent vector is their value.

The matrices that would make keys and values of each head out of the latent vector are applied to
queries and to the result instead, so that the cache holds one vector per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.inputs import Input, plain
from slipstream.kernels.linear import Linear
from slipstream.kernels.normalisation import rms_norm
from slipstream.kernels.operations import Attention
from slipstream.kernels.rotary import rotate
from slipstream.model.linear import Tensors
from slipstream.model.spec import LatentAttention, ModelSpec


class HeadsLinear(Linear):
    """A matrix for each head: x [tokens, heads * in] → [tokens, heads * out]."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [heads, in, out]"""
        self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        heads, inputs, _ = self.weight.shape
        by_head = x.view(-1, heads, inputs).transpose(0, 1)
        return torch.bmm(by_head, self.weight).transpose(0, 1).flatten(1)


class LatentHeads:
    """The attention of a layer, up to its output projection."""

    def __init__(self, spec: ModelSpec, source: Tensors, name: str) -> None:
        assert spec.latent is not None
        self.latent: LatentAttention = spec.latent
        self.heads = spec.heads
        latent = self.latent
        self.queries_down: Linear | None = None
        if latent.query_rank:
            self.queries_down = source.linear(
                f"{name}.q_a", latent.query_rank, spec.hidden_size, spec.qkv_bias
            )
            self.queries_norm = _take_norm(source, f"{name}.q_a_layernorm", latent.query_rank)
        self.queries_up = source.linear(
            f"{name}.q_b",
            spec.heads * latent.query_size,
            latent.query_rank or spec.hidden_size,
            False,
        )
        self.keys_down = source.linear(
            f"{name}.kv_a", latent.cached_size, spec.hidden_size, spec.qkv_bias
        )
        self.keys_norm = _take_norm(source, f"{name}.kv_a_layernorm", latent.kv_rank)
        rows = spec.heads * (latent.plain_size + latent.value_size)
        both = source.take(f"{name}.kv_b.weight", (rows, latent.kv_rank))
        by_head = both.view(spec.heads, -1, latent.kv_rank)
        keys = by_head[:, : latent.plain_size]
        values = by_head[:, latent.plain_size :]
        # [tokens, heads * plain_size] → [tokens, heads * kv_rank]
        self.absorb: Callable[[Tensor], Tensor] = source.in_form(HeadsLinear(keys))
        # [tokens, heads * kv_rank] → [tokens, heads * value_size]
        self.expand: Callable[[Tensor], Tensor] = source.in_form(
            HeadsLinear(values.transpose(1, 2))
        )

    def __call__(
        self,
        x: Input,
        slots: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        attention: Attention,
        rule: AttentionRule,
    ) -> Tensor:
        """Return [tokens, heads * value_size]. x: [tokens, hidden]; rope: of the step, from
        `rope_at`; cache: a layer's, [1, 1, slots, cached_size]
        """
        latent = self.latent
        heads = self._queries(x).view(-1, self.heads, latent.query_size)
        plain_parts, rotated_parts = heads.split([latent.plain_size, latent.rope_size], dim=-1)
        down = self.keys_down(x)
        vectors, key = down.split([latent.kv_rank, latent.rope_size], dim=-1)
        vectors = rms_norm(vectors, self.keys_norm, latent.norm_epsilon, down.dtype)
        rotated = rotate(torch.cat((rotated_parts, key[:, None]), dim=1), *rope)
        keys = cache[0]
        keys.index_copy_(
            1, slots, torch.cat((vectors, rotated[:, -1]), dim=-1)[None].to(keys.dtype)
        )
        absorbed = self.absorb(plain_parts.flatten(1)).view(-1, self.heads, latent.kv_rank)
        queries = torch.cat((absorbed, rotated[:, :-1]), dim=-1)
        attended = attention.attend(queries, keys, keys, rule)
        return self.expand(attended.flatten(1))

    def _queries(self, x: Input) -> Tensor:
        """x: [tokens, hidden] → [tokens, heads * query_size]"""
        if self.queries_down is None:
            return self.queries_up(x)
        down = plain(self.queries_down(x))
        epsilon = self.latent.norm_epsilon
        return self.queries_up(rms_norm(down, self.queries_norm, epsilon, down.dtype))


def _take_norm(source: Tensors, name: str, size: int) -> Tensor:
    return source.take(f"{name}.weight", (size,), torch.float32)
