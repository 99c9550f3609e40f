"""The operations on queries, keys and values between a layer's linear layer and RoPE, where the
kernels of RoPE do not do them: bounds, norms with weights of their own for each head, and scales
that grow with the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.heads import norms_in_kernel
from slipstream.model.linear import Tensors
from slipstream.model.norms import norm_weight
from slipstream.model.spec import ModelSpec, QueryScaling


@dataclass(frozen=True)
class HeadNorm:
    """The norm of all queries or of all keys of a token."""

    weight: Tensor  # float32 [heads or 1, head_size]
    bias: Tensor | None  # float32, as weight
    centred: bool  # layer norm, not RMS norm
    together: bool  # one norm over all heads
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, head_size] → the same, float32"""
        shape = x.shape[1:] if self.together else x.shape[2:]
        if self.centred:
            normal = functional.layer_norm(x.float(), shape, eps=self.epsilon)
        else:
            normal = functional.rms_norm(x.float(), shape, eps=self.epsilon)
        normal = normal * self.weight
        return normal if self.bias is None else normal + self.bias

    def with_mean(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return x [tokens, heads, head_size] normalised, float32. mean: [tokens], the mean of the
        squares of all heads, those of other ranks included
        """
        normal = x.float() * torch.rsqrt(mean + self.epsilon)[:, None, None]
        return normal * self.weight


@dataclass(frozen=True)
class PreparedHeads:
    """The changes of one layer."""

    heads: int
    kv_heads: int
    clip: float
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    scaling: QueryScaling | None
    ranks: Ranks

    def __call__(self, heads: Tensor, positions: Tensor) -> Tensor:
        """heads: [tokens, heads + 2 * kv_heads, head_size], queries first → the same"""
        if self.clip:
            heads = heads.clamp(-self.clip, self.clip)
        queries, keys, values = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.together and self.ranks.size > 1:
                queries, keys = self._normalise_all(queries, keys, self.q_norm, self.k_norm)
            else:
                queries = self.q_norm(queries)
                keys = self.k_norm(keys)
        if self.scaling is not None:
            queries = queries * _query_scale(self.scaling, positions)[:, None, None]
        return torch.cat((queries.to(values.dtype), keys.to(values.dtype), values), dim=1)

    def _normalise_all(
        self, queries: Tensor, keys: Tensor, q_norm: HeadNorm, k_norm: HeadNorm
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, each normalised over the heads of all ranks.

        All ranks have the same number of heads, so the mean of their means is that of all heads. A
        KV head that several ranks hold counts as often as every other one.
        """
        means = [x.float().square().mean(dim=(1, 2)) for x in (queries, keys)]
        q_mean, k_mean = (self.ranks.sum(torch.stack(means)) / self.ranks.size).unbind()
        return q_norm.with_mean(queries, q_mean), k_norm.with_mean(keys, k_mean)


def prepared_heads(
    spec: ModelSpec, layer: int, source: Tensors, name: str, ranks: Ranks = ALONE
) -> PreparedHeads | None:
    """Return the changes of a layer; None: there are none. name: of the layer's attention"""
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    if spec.normalises_qk(layer) and not norms_in_kernel(spec, layer):
        q_size, k_size = spec.qk_norm_sizes
        q_norm = _take_norm(spec, source, f"{name}.q_layernorm", q_size)
        k_norm = _take_norm(spec, source, f"{name}.k_layernorm", k_size)
    scaling = spec.query_scaling if spec.scales_queries(layer) else None
    if q_norm is None and scaling is None and not spec.qkv_clip:
        return None
    return PreparedHeads(spec.heads, spec.kv_heads, spec.qkv_clip, q_norm, k_norm, scaling, ranks)


def head_weights(spec: ModelSpec, source: Tensors, name: str) -> Tensor:
    """Return the weights of a norm of queries or keys for the kernel: float32 [head_size]."""
    if spec.qk_norm_kind == "plain":
        return torch.ones(spec.head_size, device=source.device)
    return norm_weight(spec, source, f"{name}.weight", spec.head_size)


def check_device(spec: ModelSpec, device: torch.device) -> None:
    """Raise ValueError if the attention kernels of the device lack something of this model."""
    missing = {
        "position biases (ALiBi)": spec.alibi is not None,
        "attention in chunks": spec.attention_chunk is not None,
        "attention in both directions": not spec.causal,
        "sink logits": spec.sink_logits,
        "multi-head latent attention": spec.latent is not None,
        "experts with biases": spec.experts is not None and spec.experts.biases,
    }
    needed = [name for name, is_needed in missing.items() if is_needed]
    if needed and device.type == "cuda":
        raise ValueError(
            f"{spec.architecture} needs {' and '.join(needed)}, which the GPU kernels lack: run it "
            "on a CPU with --device cpu"
        )


def _query_scale(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """positions: [tokens] → float32 [tokens]"""
    intervals = (positions + scaling.offset).div(scaling.interval, rounding_mode="floor")
    # in float64: in float32 on a CPU the last bit depends on the number of tokens of the step
    return (torch.log1p(intervals.double()) * scaling.beta + 1.0).float()


def _take_norm(spec: ModelSpec, source: Tensors, name: str, size: int) -> HeadNorm:
    weight = torch.ones(spec.head_size, device=source.device)
    if spec.qk_norm_kind != "plain":
        weight = norm_weight(spec, source, f"{name}.weight", size)
    bias: Tensor | None = None
    if spec.qk_norm_bias:
        bias = source.take(f"{name}.bias", (size,), torch.float32).view(-1, spec.head_size)
    return HeadNorm(
        weight.view(-1, spec.head_size),
        bias,
        centred=spec.norm == "layer",
        together=spec.qk_norm_kind == "all",
        epsilon=spec.norm_epsilon,
    )
