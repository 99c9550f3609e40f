"""The one transformer that every family is a set of options of. Only mathematics: no requests, no
blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import linear, packed_cache
from slipstream.kernels.activation import ACTIVATIONS, gated
from slipstream.kernels.adapters import DENSE, FIRST, PROJ, QKV, StepAdapters
from slipstream.kernels.attention import cache_shape
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.inputs import Input, pick, plain
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.operations import Attention, Operations, operations_on
from slipstream.kernels.options import KernelOptions
from slipstream.model.experts import Mixture
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
    adapters: StepAdapters | None = None  # None: no token has one
    logits: Tensor | None = None  # [samples, vocab] float32: where the logits may go
    # (tokens [n], [n, hidden]) that take the place of looked-up ones
    embeddings: tuple[Tensor, Tensor] | None = None


class Transformer:
    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        cache_dtype: torch.dtype | None = None,
        options: KernelOptions = KernelOptions(),
    ) -> None:
        """`positions`: how long a sequence may become; learned positions cannot go beyond their
        table.
        """
        self.spec, self.dtype, self.device = spec, dtype, device
        self.cache_dtype = cache_dtype or dtype
        self.options = options
        self.operations = operations_on(device)
        source = Tensors(tensors, dtype, device, eight_bit_inputs=not spec.narrow)
        self.embedding = source.take(
            "transformer.vocab_embedding.weight", (spec.vocab_size, spec.embedding_width)
        )
        self.project_in = self.project_out = None
        if spec.embedding_size:
            self.project_in = source.take(
                "transformer.project_in.weight", (spec.hidden_size, spec.embedding_size)
            )
            self.project_out = source.take(
                "transformer.project_out.weight", (spec.embedding_size, spec.hidden_size)
            )
        # Rounded as the model was trained with it, in the type of its embedding.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self.position_embedding: Tensor | None = None
        # by the base that layers ask for
        self.rotary: dict[float | None, tuple[Tensor, Tensor]] = {}
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            self.position_embedding = source.take("transformer.position_embedding.weight", shape)
        else:
            for theta in {spec.theta_of_layer(index) for index in range(spec.layers)}:
                cosine, sine = rotary_table(spec, positions, theta)
                self.rotary[theta] = (cosine.to(device), sine.to(device))
        self.layers = [
            Layer(spec, index, source, self.operations, options) for index in range(spec.layers)
        ]
        self.final_norm = _norm(spec, source, "transformer.ln_f") if spec.final_norm else None
        self.head = Head(spec, source, self.embedding)
        source.close()
        for layer, following in itertools.pairwise(self.layers):
            layer.lead_to(following.input_norm, following.qkv)
        self.layers[-1].lead_to(self.final_norm, self.head.product)

    def copy_weights(self, most_bytes: int) -> int:
        """Copies of weights that steps of few tokens read faster, if they fit into so many bytes →
        what they take
        """
        if not self.options.compressed_weights:
            return 0
        products = [product for layer in self.layers for product in layer.products()]
        return linear.copy_weights([*products, self.head.product], most_bytes)

    def prepare_gates(self) -> None:
        """Have kernels compiled that the steps of a start may not need."""
        for layer in self.layers:
            if layer.mixture is None and layer.gated is not None:
                linear.prepare_gate(layer.first)

    def narrow_attention(self, windows: Sequence[int], sinks: int) -> None:
        """Let layers look back no further than these windows, one after the other and again from
        the first.

        The first `sinks` tokens of a sequence stay in sight, as part of the window.
        """
        for index, layer in enumerate(self.layers if windows else ()):
            window = min(
                windows[index % len(windows)], layer.rule.window or windows[index % len(windows)]
            )
            layer.rule = replace(layer.rule, window=max(1, window - sinks), sinks=sinks)

    def new_cache(self, slots: int) -> Tensor:
        """Keys and values of all layers, in the layout that attention wants."""
        shape = cache_shape(self.spec.layers, slots, self.spec.kv_heads, self._cached_numbers)
        return torch.zeros(shape, dtype=self.cache_dtype, device=self.device)

    @property
    def cached_bytes(self) -> int:
        """What a token takes in the cache."""
        return (
            2
            * self.spec.layers
            * self.spec.kv_heads
            * self._cached_numbers
            * self.cache_dtype.itemsize
        )

    @property
    def _cached_numbers(self) -> int:
        """Of a head; words where they are packed."""
        packed = self.cache_dtype == packed_cache.DTYPE
        return packed_cache.words(self.spec.head_size) if packed else self.spec.head_size

    def __call__(self, step: Step, cache: Tensor) -> Tensor:
        """cache: what `new_cache` gave → logits [samples, vocab], float32 on CPU."""
        # The residual stream stays in float32: in bf16 every addition to it would round away what
        # layers add.
        hidden = functional.embedding(step.token_ids, self.embedding).float()
        if self.project_in is not None:
            hidden = functional.linear(hidden, self.project_in.float())
        if step.embeddings is not None:
            hidden[step.embeddings[0]] = step.embeddings[1]
        if self.embedding_scale != 1.0:
            hidden *= self.embedding_scale
        if self.position_embedding is not None:
            hidden += functional.embedding(step.positions, self.position_embedding)
        turn_at = self.operations.turn_at
        turns = {
            theta: turn_at(*table, step.positions, self.dtype)
            for theta, table in self.rotary.items()
        }
        if self.spec.norms_after:
            x: Input = hidden.to(self.dtype)
        else:
            x = self.operations.add_norm(hidden, None, self.layers[0].input_norm)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            # Of the last layer, other tokens' keys and values are all that anybody will read.
            # Adapters are planned for all tokens of a step.
            wanted = step.samples if layer is self.layers[-1] and step.adapters is None else None
            hidden, x = layer(hidden, x, step, turns.get(layer.theta), layer_cache, wanted)
        if step.samples is not None and step.adapters is not None:
            x = pick(x, step.samples)
        if self.project_out is not None:
            x = functional.linear(plain(x), self.project_out)
        return self.head(x, step.logits)


class Head:
    """From the residual stream, normalised, [samples, embedding], to logits [samples, vocab]."""

    def __init__(self, spec: ModelSpec, source: Tensors, embedding: Tensor) -> None:
        self.softcap = spec.final_softcap
        self.bias = (
            source.take("lm_head.bias", (spec.vocab_size,)).float() if spec.head_bias else None
        )
        # [vocab, hidden], where products come out rounded to 16 bits
        self.rows: Tensor | None = None
        if spec.tied_embeddings:  # a quantised engine holds a head of its own all the same
            self.rows = embedding
        else:
            self.rows = source.peek("lm_head.weight", (spec.vocab_size, spec.embedding_width))
        own = source.has("lm_head.weight")
        self.wide: Callable[..., Tensor] | None = None  # gives float32, where the device can
        if self.rows is not None and not (spec.tied_embeddings and own):
            self.wide = linear.wide(self.rows)
        if self.wide is not None:
            source.discard("lm_head.weight")
            self.product = self.wide
        elif spec.tied_embeddings and not own:
            self.product = linear.dense(embedding, None)
        else:
            self.product = source.product("lm_head", spec.vocab_size, spec.embedding_width, False)

    def __call__(self, x: Input, out: Tensor | None = None) -> Tensor:
        """`out`: where the logits may go, where the device can put them there"""
        logits = self.product(x) if self.wide is None else self.wide(x, out)
        if logits.device.type == "cpu":
            x, logits = plain(x), logits.float()
            if x.dtype != torch.float32 and self.rows is not None:
                logits = sharpen(logits, x, self.rows)
        # elsewhere they are widened where they are sampled, without a pass over all of them
        if self.bias is not None:
            # In place where the type allows: a graph's logits are otherwise held once more for each
            # size of step.
            logits = logits.add_(self.bias) if logits.dtype == torch.float32 else logits + self.bias
        return (
            logits
            if not self.softcap
            else logits.float().div_(self.softcap).tanh_().mul_(self.softcap)
        )


def sharpen(logits: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Compute the likeliest tokens' logits again in float32: logits [samples, vocab], x [samples,
    hidden].

    A 16-bit logit near 16 is a multiple of 1/16, so that the best tokens tie or trade places. What
    matters is decided among few of them, and few rows of the weight cost next to nothing to read
    again.
    """
    best = logits.topk(min(_SHARPENED, logits.shape[-1]), dim=-1).indices  # [samples, n]
    exact = torch.bmm(rows[best].float(), x.float()[:, :, None])[:, :, 0]
    return logits.scatter_(1, best, exact)


class Layer:
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        source: Tensors,
        operations: Operations,
        options: KernelOptions = KernelOptions(),
    ) -> None:
        self.spec, self.operations, self.index, self.dtype = spec, operations, index, source.dtype
        scale = spec.attention_scale or spec.head_size**-0.5
        self.rule = AttentionRule(
            scale, spec.window_of_layer(index), softcap=spec.attention_softcap
        )
        self.theta = spec.theta_of_layer(index)
        name = f"transformer.layers.{index}"
        self.input_norm = _norm(spec, source, f"{name}.input_layernorm", f"{name}.attention.qkv")
        self.qkv = source.product(
            f"{name}.attention.qkv", spec.qkv_size, spec.hidden_size, spec.qkv_bias
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = _norm_weight(
                spec, source, f"{name}.attention.q_layernorm.weight", spec.head_size
            )
            self.k_norm = _norm_weight(
                spec, source, f"{name}.attention.k_layernorm.weight", spec.head_size
            )
        self.dense = source.product(
            f"{name}.attention.dense", spec.hidden_size, spec.q_size, spec.dense_bias
        )
        self.attended_norm = self.mlp_norm = None  # of what attention and the feed-forward part add
        if spec.output_norms:
            self.attended_norm = _norm(spec, source, f"{name}.post_layernorm")
            self.mlp_norm = _norm(spec, source, f"{name}.post_feedforward_layernorm")
        first = f"{name}.mlp.{'gate_up' if spec.gated_mlp else 'fc'}"
        between = "pre_feedforward_layernorm" if spec.output_norms else "post_layernorm"
        self.post_norm = (
            self.input_norm if spec.shared_norm else _norm(spec, source, f"{name}.{between}", first)
        )
        self.activate = _activation(spec, operations, source.takes_eight_bits(f"{name}.mlp.proj"))
        self.next_norm: Norm | None = None  # see lead_to
        # of a single token, with all up to the next product
        self.joint_dense: linear.Joint | None = None
        self.joint_proj: linear.Joint | None = None
        self.mixture: Mixture | None = None
        if spec.experts_of_layer(index) is not None:
            self.mixture = Mixture(spec, source, f"{name}.mlp", self.activate)
            return
        rows = 2 * spec.ffn_size if spec.gated_mlp else spec.ffn_size
        self.first = source.product(first, rows, spec.hidden_size, spec.mlp_bias)
        self.gated = linear.gated(self.first) if self.activate == operations.silu_gated else None
        self.proj = source.product(
            f"{name}.mlp.proj", spec.hidden_size, spec.ffn_size, spec.mlp_bias
        )
        plain_residual = not (spec.norms_after or spec.parallel_residual or spec.output_norms)
        if plain_residual and options.fused_gemv:
            self.joint_dense = linear.joint(self.dense, self.post_norm, self.first)

    def products(self) -> list[linear.Product]:
        """Those that every token takes; of a mixture, the shared expert's."""
        if self.mixture is None:
            return [self.qkv, self.dense, self.first, self.proj]
        shared = self.mixture.shared
        return [self.qkv, self.dense, *(() if shared is None else (shared.first, shared.proj))]

    def lead_to(self, norm: Norm | None, taker: linear.Product) -> None:
        """What the layer's results go into: a norm, and the product that takes what it gives."""
        self.next_norm = norm
        if self.joint_dense is not None:
            self.joint_proj = linear.joint(self.proj, norm, taker)

    def __call__(
        self,
        hidden: Tensor,
        x: Input,
        step: Step,
        turn: tuple[Tensor, Tensor] | None,
        cache: Tensor,
        wanted: Tensor | None,
    ) -> tuple[Tensor, Input]:
        """hidden: the residual stream; x: the same, normalised for this layer; wanted: the tokens
        whose results are, None: all → the stream behind this layer, and the same, normalised for
        what follows, of those
        """
        spec = self.spec
        attended = self.attention(x, step, turn, cache)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
            x = pick(x, wanted) if spec.parallel_residual else x
        if hidden.shape[0] == 0:  # a step in the midst of a prompt
            return hidden, hidden.to(self.dtype)
        joins = hidden.shape[0] == 1 and step.adapters is None
        if joins and self.joint_dense is not None:
            x = self.joint_dense(attended, hidden)
        else:
            delta = self._adapted(self.dense(attended), attended, step, DENSE)
            if spec.norms_after:
                x = _normed_sum(hidden, delta, self.input_norm)
                return hidden, _normed_sum(hidden, self.mlp(x, step), self.post_norm)
            if spec.parallel_residual:
                x = (
                    x
                    if spec.shared_norm
                    else self.operations.add_norm(hidden, None, self.post_norm)
                )
                return hidden, self._sum(hidden, delta + self.mlp(x, step), self.next_norm)
            x = self._sum(hidden, delta, self.post_norm, self.attended_norm)
        if joins and self.joint_proj is not None:
            return hidden, self.joint_proj(self.middle(x, step), hidden)
        return hidden, self._sum(hidden, self.mlp(x, step), self.next_norm, self.mlp_norm)

    def _sum(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None, own_norm: Norm | None = None
    ) -> Input:
        """Add delta, normalised by `own_norm`, to the residual stream → the sum, normalised by
        `norm`
        """
        if own_norm is not None:
            delta = self.operations.normalise(delta, own_norm)
        if norm is None:
            return hidden.add_(delta).to(self.dtype)
        return self.operations.add_norm(hidden, delta, norm)

    def attention(
        self, x: Input, step: Step, turn: tuple[Tensor, Tensor] | None, cache: Tensor
    ) -> Tensor:
        """x: [tokens, hidden]; cache: a layer of `new_cache` → [tokens, heads * head_size]"""
        spec = self.spec
        keys, values = cache.unbind()
        heads = self._adapted(self.qkv(x), x, step, QKV).view(
            -1, spec.heads + 2 * spec.kv_heads, spec.head_size
        )
        queries = self.operations.rotate_write(
            heads,
            step.positions,
            step.slots,
            turn,
            self.q_norm,
            self.k_norm,
            spec.norm_epsilon,
            keys,
            values,
        )
        return step.attention.attend(queries, keys, values, self.rule).view(-1, spec.q_size)

    def mlp(self, x: Input, step: Step) -> Tensor:
        """x: [tokens, hidden] → [tokens, hidden]"""
        if self.mixture is not None:
            return self.mixture(plain(x))
        middle = self.middle(x, step)
        return self._adapted(self.proj(middle), middle, step, PROJ)

    def middle(self, x: Input, step: Step) -> Input:
        """x: [tokens, hidden] → [tokens, ffn], activated"""
        if self.gated is not None and step.adapters is None:
            return self.gated(x)
        return self.activate(self._adapted(self.first(x), x, step, FIRST))

    def _adapted(self, y: Tensor, x: Input, step: Step, product: int) -> Tensor:
        """y, which a product made of x, with what the tokens' adapters add to it."""
        if step.adapters is not None:
            step.adapters.add(y, plain(x), self.index, product)
        return y


def _normed_sum(hidden: Tensor, delta: Tensor, norm: Norm) -> Tensor:
    """Make the residual stream its sum with `delta`, normalised → the same in the type of `delta`."""
    assert norm.bias is not None
    hidden += delta
    hidden.copy_(
        functional.layer_norm(
            hidden, norm.weight.shape, norm.weight.float(), norm.bias.float(), norm.epsilon
        )
    )
    return hidden.to(delta.dtype)


def _activation(
    spec: ModelSpec, operations: Operations, eight_bits: bool
) -> Callable[[Tensor], Any]:
    """What stands between the two products: [tokens, 2 * ffn], or [tokens, ffn] without a gate →
    [tokens, ffn]
    """
    activation = ACTIVATIONS[spec.activation]
    if not spec.gated_mlp:
        return activation
    if spec.activation != "silu":
        return partial(gated, activation=activation)
    return operations.silu_gated_quantised if eight_bits else operations.silu_gated


def _norm(spec: ModelSpec, source: Tensors, name: str, product: str = "") -> Norm:
    """`product`: the one that alone takes the result, in whatever form suits it."""
    weight = _norm_weight(spec, source, f"{name}.weight", spec.hidden_size)
    bias = (
        source.take(f"{name}.bias", (spec.hidden_size,), torch.float32)
        if spec.norm == "layer"
        else None
    )
    return Norm(weight, bias, spec.norm_epsilon, source.takes_eight_bits(product), source.dtype)


def _norm_weight(spec: ModelSpec, source: Tensors, name: str, size: int) -> Tensor:
    """In float32: 16 bits would round its sum with the offset, and what is normalised before it is
    scaled.
    """
    return source.take(name, (size,), torch.float32) + spec.norm_offset
