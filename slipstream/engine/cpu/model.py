"""A model for the compiled CPU path: packed weights, and the program of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.attention import cache_shape
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.cpu.memory import round_up
from slipstream.kernels.cpu.operations import Format
from slipstream.kernels.cpu.pack import Packed, interleave_halves, pack, padded_floats
from slipstream.kernels.options import KernelOptions
from slipstream.model.linear import Tensors
from slipstream.model.position import rotary_size, rotary_table
from slipstream.model.spec import ModelSpec


class NormWeights(NamedTuple):
    weight: np.ndarray  # float32 [padded size]
    bias: np.ndarray | None


class LinearWeights(NamedTuple):
    packed: Packed
    bias: np.ndarray | None  # float32 [padded outputs]


@dataclass
class LayerWeights:
    input_norm: NormWeights
    qkv: LinearWeights
    dense: LinearWeights
    up: LinearWeights
    down: LinearWeights
    post_norm: NormWeights | None  # before the MLP; None: it takes what attention takes
    attended_norm: NormWeights | None  # of what attention adds to the residual stream
    mlp_norm: NormWeights | None
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    theta: float | None
    rule: AttentionRule = field(default_factory=lambda: AttentionRule(1.0))


class CpuModel:
    """The weights of a model in packed form. The methods are those of `Transformer` that an engine
    needs around its steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        positions: int,
        options: KernelOptions = KernelOptions(),
    ) -> None:
        """positions: the longest sequence. `tensors` is emptied."""
        self.spec = spec
        self.dtype = dtype
        self.cache_dtype = dtype
        self.device = torch.device("cpu")
        self.options = options
        self.format = Format.F32 if dtype == torch.float32 else Format.BF16
        self._source = Tensors(tensors, dtype, self.device)
        self._given = tensors
        self.width = round_up(spec.hidden_size, 32)
        tied = spec.tied_embeddings
        self.embedding = self._matrix(
            "transformer.vocab_embedding", spec.vocab_size, spec.hidden_size
        )
        # rounded as the model was trained with it, in the type of its embedding
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self._take_positions(positions)
        self.layers = [self._layer(index) for index in range(spec.layers)]
        self.final_norm = self._norm("transformer.ln_f") if spec.final_norm else None
        if tied:
            self.head = LinearWeights(self.embedding, self._head_bias(self.embedding.outputs))
        else:
            packed = self._matrix("lm_head", spec.vocab_size, spec.hidden_size)
            self.head = LinearWeights(packed, self._head_bias(packed.outputs))
        self.score = self._score_layer()
        self._source.close()
        tensors.clear()

    def _take_positions(self, positions: int) -> None:
        spec = self.spec
        self.learned_positions: np.ndarray | None = None
        # theta → cosine and sine, float32 [positions, half]
        self.rope: dict[float | None, tuple[np.ndarray, np.ndarray]] = {}
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            table = self._source.take("transformer.position_embedding.weight", shape)
            self.learned_positions = table.float().numpy()
            return
        half = rotary_size(spec) // 2
        for theta in {spec.theta_of_layer(index) for index in range(spec.layers)}:
            cosine, signed_sine = rotary_table(spec, positions, theta)
            self.rope[theta] = (
                np.ascontiguousarray(cosine.numpy()[:, :half]),
                np.ascontiguousarray(signed_sine.numpy()[:, half:]),
            )

    def _layer(self, index: int) -> LayerWeights:
        spec = self.spec
        name = f"transformer.layers.{index}"
        gated = spec.gated_mlp
        rows = 2 * spec.ffn_size if gated else spec.ffn_size
        attended_norm = mlp_norm = post_norm = None
        if spec.output_norms:
            attended_norm = self._norm(f"{name}.post_layernorm")
            mlp_norm = self._norm(f"{name}.post_feedforward_layernorm")
        if not spec.shared_norm:
            between = "pre_feedforward_layernorm" if spec.output_norms else "post_layernorm"
            post_norm = self._norm(f"{name}.{between}")
        qkv = f"{name}.attention.qkv"
        dense = f"{name}.attention.dense"
        up = f"{name}.mlp.{'gate_up' if gated else 'fc'}"
        down = f"{name}.mlp.proj"
        scale = spec.attention_scale or spec.head_size**-0.5
        return LayerWeights(
            input_norm=self._norm(f"{name}.input_layernorm"),
            qkv=self._linear(qkv, spec.qkv_size, spec.hidden_size, spec.qkv_bias),
            dense=self._linear(dense, spec.hidden_size, spec.q_size, spec.o_proj_bias),
            up=self._linear(up, rows, spec.hidden_size, spec.mlp_bias, gated),
            down=self._linear(down, spec.hidden_size, spec.ffn_size, spec.mlp_bias),
            post_norm=post_norm,
            attended_norm=attended_norm,
            mlp_norm=mlp_norm,
            q_norm=self._head_norm(f"{name}.attention.q_layernorm"),
            k_norm=self._head_norm(f"{name}.attention.k_layernorm"),
            theta=spec.theta_of_layer(index),
            rule=AttentionRule(scale, spec.window_of_layer(index), softcap=spec.attention_softcap),
        )

    def _matrix(self, name: str, outputs: int, inputs: int, gated: bool = False) -> Packed:
        tensor = self._source.take(f"{name}.weight", (outputs, inputs))
        if not tensor.numel():  # missing: `close` raises
            tensor = torch.zeros(1, 1, dtype=self.dtype)
            gated = False
        if tensor.dtype == torch.bfloat16:
            return pack(tensor.view(torch.uint16).numpy(), gated)
        return pack(tensor.numpy(), gated)

    def _linear(
        self, name: str, outputs: int, inputs: int, bias: bool, gated: bool = False
    ) -> LinearWeights:
        packed = self._matrix(name, outputs, inputs, gated)
        numbers: np.ndarray | None = None
        if bias:
            numbers = self._source.take(f"{name}.bias", (outputs,)).float().numpy()
            numbers = padded_floats(
                interleave_halves(numbers) if gated else numbers, packed.outputs
            )
        return LinearWeights(packed, numbers)

    def _head_bias(self, outputs: int) -> np.ndarray | None:
        if not self.spec.head_bias:
            return None
        bias = self._source.take("lm_head.bias", (self.spec.vocab_size,))
        return padded_floats(bias.float().numpy(), outputs)

    def _norm(self, name: str) -> NormWeights:
        spec = self.spec
        weight = self._vector(f"{name}.weight") + spec.norm_offset
        bias: np.ndarray | None = None
        if spec.norm == "layer":
            bias = padded_floats(self._vector(f"{name}.bias"), self.width)
        return NormWeights(padded_floats(weight, self.width), bias)

    def _head_norm(self, name: str) -> np.ndarray | None:
        if not self.spec.qk_norm:
            return None
        weight = self._source.take(f"{name}.weight", (self.spec.head_size,), torch.float32)
        return padded_floats(weight.numpy() + self.spec.norm_offset, self.spec.head_size)

    def _vector(self, name: str) -> np.ndarray:
        taken = self._source.take(name, (self.spec.hidden_size,), torch.float32)
        found: np.ndarray = taken.numpy()
        return found

    def _score_layer(self) -> Callable[[Tensor], Tensor] | None:
        """Return the output layer of a classifier: [hidden] float32 → [labels]."""
        spec = self.spec
        if not spec.labels:
            return None
        shape = (spec.labels, spec.hidden_size)
        weight = self._source.take("score.weight", shape, torch.float32)
        return lambda states: functional.linear(states, weight)

    @property
    def queries_of_group(self) -> int:
        return self.spec.heads // self.spec.kv_heads

    @property
    def middle_width(self) -> int:
        """Elements of a row between the two linear layers of the MLP, with padding."""
        return self.layers[0].down.packed.inputs

    @property
    def half(self) -> int:
        """Pairs of a head that RoPE rotates."""
        return rotary_size(self.spec) // 2 if self.rope else 0

    def set_attention_windows(self, windows: Sequence[int], sinks: int) -> None:
        """As `Transformer.set_attention_windows`."""
        for index, layer in enumerate(self.layers if windows else ()):
            given = windows[index % len(windows)]
            window = min(given, layer.rule.window or given)
            layer.rule = replace(layer.rule, window=max(1, window - sinks), sinks=sinks)

    def new_cache(self, slots: int) -> Tensor:
        """Return an empty cache for the keys and values of all layers, in attention's layout."""
        shape = cache_shape(self.spec.layers, slots, self.spec.kv_heads, self.spec.head_size)
        return torch.zeros(shape, dtype=self.cache_dtype)

    @property
    def cached_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        elements = 2 * self.spec.layers * self.spec.kv_heads * self.spec.head_size
        return elements * self.cache_dtype.itemsize
