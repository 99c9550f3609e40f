"""The weights of a model's layers, as the program of a step takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.cpu.operations import Format, TableFormat, WeightFormat
from slipstream.kernels.cpu.pack import Packed
from slipstream.kernels.cpu.quantised_layouts import LAYOUT_OF


class NormWeights(NamedTuple):
    weight: np.ndarray  # float32 [padded size]
    bias: np.ndarray | None


class LinearWeights(NamedTuple):
    parts: tuple[Packed, ...]  # their outputs follow each other
    bias: np.ndarray | None  # float32 [padded outputs]
    exact: bool  # quantised weights take activations of bfloat16

    @property
    def outputs(self) -> int:
        """Outputs, with padding."""
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        """Inputs, with padding."""
        return self.parts[0].inputs

    @property
    def takes(self) -> Format:
        """The format of the activations that the weights are multiplied by."""
        return _taken_by(self.parts[0].format, self.exact)


def _taken_by(kind: WeightFormat, exact: bool) -> Format:
    if kind is WeightFormat.F32:
        return Format.F32
    return Format.BF16 if kind is WeightFormat.BF16 or exact else Format.INT8


class ExpertWeights:
    """A linear layer of each of some experts."""

    def __init__(self, experts: tuple[Packed, ...], bias: np.ndarray | None, exact: bool) -> None:
        """bias: float32 [experts, padded outputs]; exact: see `LinearWeights`"""
        self.experts = experts
        self.bias = bias
        self.exact = exact and experts[0].format in LAYOUT_OF
        # int64 [experts, 3], as `ExpertLinear` takes it
        self.table = np.array(
            [(packed.address, packed.format, packed.block_bytes) for packed in experts],
            dtype=np.int64,
        )
        taken = {_taken_by(packed.format, exact) for packed in experts}
        if len(taken) > 1:
            raise ValueError(
                "some experts of a layer are quantised and some are not: set cpu_code to off"
            )
        self.takes = taken.pop()

    @property
    def outputs(self) -> int:
        """Outputs of an expert, with padding."""
        return self.experts[0].outputs

    @property
    def inputs(self) -> int:
        """Inputs, with padding."""
        return self.experts[0].inputs


@dataclass
class MixtureWeights:
    """The experts of a layer."""

    router: LinearWeights
    up: ExpertWeights
    down: ExpertWeights
    held: range  # the experts of this rank
    shared_up: LinearWeights | None  # of the expert that all tokens take
    shared_down: LinearWeights | None
    shared_router: LinearWeights | None


class HeadNorms(NamedTuple):
    """Norms of queries and keys that RoPE's operation does not have. Weights are float32, those of
    all heads.
    """

    q_weight: np.ndarray
    q_bias: np.ndarray | None
    k_weight: np.ndarray
    k_bias: np.ndarray | None
    together: bool  # one norm over all heads


class EmbeddingTable(NamedTuple):
    format: TableFormat
    address: int
    stride: int  # bytes of 32 packed outputs, or of a row
    kept: object  # the memory


@dataclass
class LayerWeights:
    input_norm: NormWeights | None
    qkv: LinearWeights
    dense: LinearWeights
    up: LinearWeights | None  # None: the layer has experts
    down: LinearWeights | None
    mixture: MixtureWeights | None
    post_norm: NormWeights | None  # before the MLP, or after it with `norms_after`
    attended_norm: NormWeights | None  # of what attention adds to the residual stream
    mlp_norm: NormWeights | None
    q_norm: np.ndarray | None  # RMS norms of each head, with the same weights for all
    k_norm: np.ndarray | None
    head_norms: HeadNorms | None  # other ones
    query_scales: np.ndarray | None  # float32 [positions]
    sink_logits: np.ndarray | None  # float32 [heads]
    rotates: bool
    theta: float | None
    rule: AttentionRule
