"""The transformer: one implementation, with every model family as a set of its options.

Only mathematics: no requests, no blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import packed_cache
from slipstream.kernels.adapter_layout import DOWN_PROJ, O_PROJ, QKV, UP_PROJ
from slipstream.kernels.adapters import StepAdapters
from slipstream.kernels.attention_rule import cache_shape
from slipstream.kernels.inputs import Input, pick, plain
from slipstream.kernels.linear import (
    FusedLinear,
    Linear,
    UnquantisedLinear,
    compress_weights,
    fuse_residual_norm,
)
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.operations import Attention, Operations, operations_on
from slipstream.kernels.options import KernelOptions
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.activation import mlp_activation
from slipstream.model.experts import Mixture
from slipstream.model.head import Head, score_layer
from slipstream.model.heads import attention_rule, norms_in_kernel
from slipstream.model.latent_attention import LatentHeads
from slipstream.model.linear import Tensors
from slipstream.model.norms import normed_sum, take_norm
from slipstream.model.position import rotary_table
from slipstream.model.query_key import (
    check_device,
    head_weights,
    prepared_heads,
)
from slipstream.model.spec import ModelSpec

RopeTables = tuple[Tensor, Tensor]  # cosine and signed sine


@dataclass(slots=True)
class Step:
    """The inputs of one forward pass."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]: the cache slots of their keys and values
    attention: Attention
    samples: Tensor | None  # [samples]: the tokens whose logits are computed; None: all
    adapters: StepAdapters | None = None  # None: no token has an adapter
    logits: Tensor | None = None  # [samples, vocab] float32: memory for the logits
    # (tokens [n], rows [n, hidden]): given embeddings in place of looked-up ones
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
        ranks: Ranks = ALONE,
    ) -> None:
        """positions: the longest sequence; learned positions end with their table.

        With several ranks, spec and tensors are this rank's: see weights/shards.py.
        """
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.cache_dtype = cache_dtype or dtype
        self.options = options
        self.operations = operations_on(device)
        check_device(spec, device)
        source = Tensors(
            tensors,
            dtype,
            device,
            fp8_inputs=not spec.fp8_sensitive,
            batch_invariant=options.deterministic,
        )
        self.embedding = source.take(
            "transformer.vocab_embedding.weight", (spec.vocab_size, spec.embedding_width)
        )
        self._take_projections(source)
        # Rounded as the model was trained with it, in the type of its embedding.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self.embedding_norm = _embedding_norm(spec, source)
        self._take_positions(source, positions)
        self.layers = [
            Layer(spec, index, source, self.operations, options, ranks)
            for index in range(spec.layers)
        ]
        self.final_norm = take_norm(spec, source, "transformer.ln_f") if spec.final_norm else None
        self.ranks = ranks
        self.head = Head(spec, source, self.embedding, ranks)
        self.score = score_layer(spec, source)
        source.close()
        for layer, following in itertools.pairwise(self.layers):
            layer.set_consumer(following.input_norm, following.qkv)
        self.layers[-1].set_consumer(self.final_norm, self.head.linear)

    def _take_positions(self, source: Tensors, positions: int) -> None:
        """Take the learned positions, or compute the tables of RoPE."""
        spec = self.spec
        self.position_embedding: Tensor | None = None
        self.rope: dict[float | None, RopeTables] = {}  # by a layer's theta
        if spec.position == "alibi":
            return
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            self.position_embedding = source.take("transformer.position_embedding.weight", shape)
            if spec.token_types:
                shape = (spec.token_types, spec.hidden_size)
                types = source.take("transformer.type_embedding.weight", shape, torch.float32)
                self.position_embedding = self.position_embedding.float() + types[0]
        else:
            rotated = filter(spec.rotates_layer, range(spec.layers))
            for theta in {spec.theta_of_layer(index) for index in rotated}:
                cosine, sine = rotary_table(spec, positions, theta)
                self.rope[theta] = (
                    torch.from_numpy(cosine).to(self.device),
                    torch.from_numpy(sine).to(self.device),
                )

    def _take_projections(self, source: Tensors) -> None:
        """Take the linear layers between embeddings and layers of another size."""
        spec = self.spec
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if spec.embedding_size:
            into = source.take(
                "transformer.project_in.weight", (spec.hidden_size, spec.embedding_size)
            )
            out = source.take(
                "transformer.project_out.weight", (spec.embedding_size, spec.hidden_size)
            )
            self.project_in = source.in_form(UnquantisedLinear(into.float(), None))
            self.project_out = source.in_form(UnquantisedLinear(out, None))

    def compress_weights(self, most_bytes: int) -> int:
        """Make 12-bit copies of the weights that every token reads, if they fit into `most_bytes`.
        Return the bytes that they take. Switch: `KernelOptions.compressed_weights`.
        """
        if not self.options.compressed_weights:
            return 0
        linears: list[Linear] = []
        for layer in self.layers:
            linears += layer.linears()
        return compress_weights([*linears, self.head.linear], most_bytes)

    def prepare_gates(self) -> None:
        """Compile kernels that the warm-up steps may not need."""
        for layer in self.layers:
            if layer.mixture is None and layer.gated is not None:
                layer.up_proj.prepare_gate()

    def set_attention_windows(self, windows: Sequence[int], sinks: int) -> None:
        """Restrict the attention of layers to these windows. Layer i takes window i, cyclically.

        The first `sinks` tokens of a sequence are always attended to, as part of the window.
        """
        if not self.spec.causal:
            raise ValueError(
                "attention_windows: the model's attention goes in both directions; remove them "
                "(max_attention_window_size)"
            )
        for index, layer in enumerate(self.layers if windows else ()):
            given = windows[index % len(windows)]
            window = min(given, layer.rule.window or given)
            layer.rule = replace(layer.rule, window=max(1, window - sinks), sinks=sinks)

    def new_cache(self, slots: int) -> Tensor:
        """Return an empty cache for the keys and values of all layers, in attention's layout."""
        spec = self.spec
        shape = cache_shape(
            spec.layers, slots, spec.kv_heads, self._cached_elements, spec.cached_vectors
        )
        return torch.zeros(shape, dtype=self.cache_dtype, device=self.device)

    @property
    def cached_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        spec = self.spec
        vectors = spec.cached_vectors * spec.layers * spec.kv_heads
        return vectors * self._cached_elements * self.cache_dtype.itemsize

    @property
    def _cached_elements(self) -> int:
        """Elements of a token's cached head: numbers, or words of the 12-bit format."""
        packed = self.cache_dtype == packed_cache.DTYPE
        return packed_cache.words(self.spec.head_size) if packed else self.spec.head_size

    def __call__(self, step: Step, cache: Tensor) -> Tensor:
        """Return the logits [samples, vocab], float32 on a CPU. cache: from `new_cache`."""
        return self.head(self.final_states(step, cache), step.logits)

    def best_tokens(self, step: Step, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each sample and its token: [samples] each."""
        return self.head.best_tokens(self.final_states(step, cache))

    def logits_and_states(self, step: Step, cache: Tensor, logits: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the first `logits` samples, and the final states of the others.

        The states are normalised, as the output layer takes them: [samples - logits, hidden].
        """
        states = plain(self.final_states(step, cache))
        return self.head(states[:logits]), states[logits:]

    def final_states(self, step: Step, cache: Tensor) -> Input:
        """Return the input of the output layer: [samples, hidden]."""
        hidden = self.embed(step)
        rope_at = self.operations.rope_at
        ropes = {
            theta: rope_at(*tables, step.positions, self.dtype)
            for theta, tables in self.rope.items()
        }
        first_norm = self.layers[0].input_norm
        if self.spec.norms_after or first_norm is None:
            x: Input = hidden.to(self.dtype)
        else:
            x = self.operations.add_norm(hidden, None, first_norm)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            # After the last layer only sampled tokens are used; of the others, keys and values
            # are enough. Adapters are planned for all tokens of a step.
            wanted = step.samples if layer is self.layers[-1] and step.adapters is None else None
            rope = ropes[layer.theta] if layer.rotates else None
            hidden, x = layer(hidden, x, step, rope, layer_cache, wanted)
        if step.samples is not None and step.adapters is not None:
            x = pick(x, step.samples)
        if self.project_out is not None:
            x = self.project_out(plain(x))
        return x

    def embed(self, step: Step) -> Tensor:
        """Return the residual stream before the first layer: float32 [tokens, hidden]."""
        # The residual stream stays in float32: bf16 would round away what layers add to it.
        hidden = functional.embedding(step.token_ids, self.embedding).float()
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if step.embeddings is not None:
            hidden[step.embeddings[0]] = step.embeddings[1]
        if self.embedding_scale != 1.0:
            hidden *= self.embedding_scale
        if self.position_embedding is not None:
            hidden += functional.embedding(step.positions, self.position_embedding)
        if self.embedding_norm is not None:
            hidden = self.operations.normalise(hidden, self.embedding_norm)
        return hidden


def _embedding_norm(spec: ModelSpec, source: Tensors) -> Norm | None:
    if not spec.embedding_norm:
        return None
    norm = take_norm(spec, source, "transformer.ln_embed")
    return replace(norm, dtype=torch.float32)  # the residual stream's type


class Layer:
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        source: Tensors,
        operations: Operations,
        options: KernelOptions = KernelOptions(),
        ranks: Ranks = ALONE,
    ) -> None:
        self.spec = spec
        self.operations = operations
        self.ranks = ranks
        # adds what this rank computed to the residual stream, summed over the ranks
        self.add_norm = operations.add_norm
        if ranks.size > 1:
            self.add_norm = partial(ranks.sum_add_norm, add_norm=operations.add_norm)
        self.index = index
        self.dtype = source.dtype
        self.rule = attention_rule(spec, index, ranks)
        self.theta = spec.theta_of_layer(index)
        self.rotates = spec.rotates_layer(index)
        name = f"transformer.layers.{index}"
        self._take_attention(source, name)
        up_proj = f"{name}.mlp.{'gate_up' if spec.gated_mlp else 'fc'}"
        self._take_norms(source, name, up_proj)
        fp8_middle = source.takes_fp8_inputs(f"{name}.mlp.proj")
        self.activate = mlp_activation(spec, operations, fp8_middle)
        # fused kernels for a single token: linear layer, residual addition and the next norm
        self.fused_o_proj: FusedLinear | None = None
        self.fused_down_proj: FusedLinear | None = None
        self.mixture: Mixture | None = None
        if spec.experts_of_layer(index) is not None:
            self.mixture = Mixture(spec, source, f"{name}.mlp", self.activate, ranks)
            return
        self._take_mlp(source, up_proj, f"{name}.mlp.proj")
        plain_residual = spec.residual_scale == 1.0 and not (
            spec.norms_after or spec.parallel_residual or spec.output_norms
        )
        # A sum over the ranks belongs between linear layer and norm, so one kernel cannot be both.
        if plain_residual and options.fused_gemv and ranks.size == 1:
            assert self.post_norm is not None
            self.fused_o_proj = fuse_residual_norm(self.o_proj, self.post_norm, self.up_proj)

    def _take_attention(self, source: Tensors, name: str) -> None:
        spec = self.spec
        self.input_norm: Norm | None = None
        if spec.input_norms:
            qkv = f"{name}.attention.qkv"
            self.input_norm = take_norm(spec, source, f"{name}.input_layernorm", qkv)
        self.latent: LatentHeads | None = None
        if spec.latent is not None:
            self.latent = LatentHeads(spec, source, f"{name}.attention")
            self.qkv = self.latent.keys_down
        else:
            self.qkv = source.linear(
                f"{name}.attention.qkv", spec.qkv_size, spec.hidden_size, spec.qkv_bias
            )
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        if norms_in_kernel(spec, self.index):
            self.q_norm = head_weights(spec, source, f"{name}.attention.q_layernorm")
            self.k_norm = head_weights(spec, source, f"{name}.attention.k_layernorm")
        self.prepare_heads = prepared_heads(
            spec, self.index, source, f"{name}.attention", self.ranks
        )
        if spec.sink_logits:
            sinks = source.take(f"{name}.attention.sinks.weight", (spec.heads,), torch.float32)
            self.rule = replace(self.rule, sink_logits=tuple(sinks.tolist()))
        self.o_proj = source.linear(
            f"{name}.attention.dense", spec.hidden_size, spec.attended_size, spec.o_proj_bias
        )

    def _take_norms(self, source: Tensors, name: str, up_proj: str) -> None:
        """up_proj: the name of the linear layer behind the second norm"""
        spec = self.spec
        # norms of what attention and the MLP add to the residual stream
        self.attended_norm: Norm | None = None
        self.mlp_norm: Norm | None = None
        if spec.output_norms:
            self.attended_norm = take_norm(spec, source, f"{name}.post_layernorm")
            self.mlp_norm = take_norm(spec, source, f"{name}.post_feedforward_layernorm")
        self.post_norm = self.input_norm
        if not spec.shared_norm and spec.input_norms:
            between = "pre_feedforward_layernorm" if spec.output_norms else "post_layernorm"
            self.post_norm = take_norm(spec, source, f"{name}.{between}", up_proj)
        self.next_norm: Norm | None = None  # the norm behind this layer: see `set_consumer`

    def _take_mlp(self, source: Tensors, up_proj: str, down_proj: str) -> None:
        spec = self.spec
        rows = 2 * spec.ffn_size if spec.gated_mlp else spec.ffn_size
        self.up_proj = source.linear(up_proj, rows, spec.hidden_size, spec.mlp_bias)
        # the up projection with its activation in one kernel, if there is such a kernel
        self.gated: Callable[[Input], Tensor] | None = None
        if self.up_proj.fuses_gate and self.activate == self.operations.silu_gated:
            self.gated = self.up_proj.gated
        self.down_proj = source.linear(down_proj, spec.hidden_size, spec.ffn_size, spec.mlp_bias)

    def linears(self) -> list[Linear]:
        """Return the linear layers that every token takes; of a mixture, the shared expert's."""
        if self.mixture is None:
            return [self.qkv, self.o_proj, self.up_proj, self.down_proj]
        shared = self.mixture.shared
        experts = [] if shared is None else [shared.up_proj, shared.down_proj]
        return [self.qkv, self.o_proj, *experts]

    def set_consumer(self, norm: Norm | None, consumer: Linear) -> None:
        """Set what takes this layer's result: the next norm, and the linear layer behind it."""
        self.next_norm = norm
        if self.fused_o_proj is not None:
            self.fused_down_proj = fuse_residual_norm(self.down_proj, norm, consumer)

    def __call__(
        self,
        hidden: Tensor,
        x: Input,
        step: Step,
        rope: RopeTables | None,
        cache: Tensor,
        wanted: Tensor | None,
    ) -> tuple[Tensor, Input]:
        """Return the residual stream behind this layer, and the same normalised for what follows.

        hidden: the residual stream; x: the same, normalised for this layer; wanted: the tokens
        whose results are computed, None: all
        """
        attended = self.attention(x, step, rope, cache)
        if wanted is not None:
            hidden = hidden[wanted]
            attended = attended[wanted]
            x = pick(x, wanted) if self.spec.parallel_residual else x
        if hidden.shape[0] == 0:  # a step inside a prompt samples nothing
            return hidden, hidden.to(self.dtype)
        fused = hidden.shape[0] == 1 and step.adapters is None
        if fused and self.fused_o_proj is not None:
            x = self.fused_o_proj(attended, hidden)
        else:
            delta = self._adapted(self.o_proj(attended), attended, step, O_PROJ)
            if self.spec.norms_after:
                x = normed_sum(hidden, self.ranks.sum(delta), self.input_norm)
                output = self.ranks.sum(self.mlp(x, step))
                return hidden, normed_sum(hidden, output, self.post_norm)
            if self.spec.parallel_residual:
                if not self.spec.shared_norm and self.post_norm is not None:
                    x = self.operations.add_norm(hidden, None, self.post_norm)
                return hidden, self._sum(hidden, delta + self.mlp(x, step), self.next_norm)
            x = self._sum(hidden, delta, self.post_norm, self.attended_norm)
        if fused and self.fused_down_proj is not None:
            return hidden, self.fused_down_proj(self.middle(x, step), hidden)
        return hidden, self._sum(hidden, self.mlp(x, step), self.next_norm, self.mlp_norm)

    def _sum(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None, own_norm: Norm | None = None
    ) -> Input:
        """Add delta, summed over the ranks and normalised by `own_norm`, to the residual stream in
        place. Return the sum normalised by `norm`.
        """
        if self.spec.residual_scale != 1.0 and own_norm is None:
            delta = delta * self.spec.residual_scale
        if own_norm is None and norm is not None:
            return self.add_norm(hidden, delta, norm)
        delta = self.ranks.sum(delta)
        if own_norm is not None:
            delta = self.operations.normalise(delta, own_norm)
        if norm is None:
            return hidden.add_(delta).to(self.dtype)
        return self.operations.add_norm(hidden, delta, norm)

    def attention(self, x: Input, step: Step, rope: RopeTables | None, cache: Tensor) -> Tensor:
        """x: [tokens, hidden]; cache: a layer of `new_cache` → [tokens, attended_size]"""
        spec = self.spec
        if self.latent is not None:
            assert rope is not None
            return self.latent(x, step.slots, rope, cache, step.attention, self.rule)
        keys, values = cache.unbind()
        qkv = self._adapted(self.qkv(x), x, step, QKV)
        heads = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_size)
        if self.prepare_heads is not None:
            heads = self.prepare_heads(heads, step.positions)
        queries = self.operations.rotate_write(
            heads,
            step.positions,
            step.slots,
            rope,
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
        return self._adapted(self.down_proj(middle), middle, step, DOWN_PROJ)

    def middle(self, x: Input, step: Step) -> Input:
        """x: [tokens, hidden] → the activated middle of the MLP, an `Input` [tokens, ffn]"""
        if self.gated is not None and step.adapters is None:
            return self.gated(x)
        activated: Input = self.activate(self._adapted(self.up_proj(x), x, step, UP_PROJ))
        return activated

    def _adapted(self, y: Tensor, x: Input, step: Step, linear: int) -> Tensor:
        """Add to y, the output of a linear layer for x, what the tokens' adapters add to it."""
        if step.adapters is not None:
            step.adapters.add(y, plain(x), self.index, linear)
        return y
