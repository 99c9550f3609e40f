"""A model for the compiled CPU path: packed weights, and the program of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from slipstream.engine.cpu.layer_weights import (
    EmbeddingTable,
    ExpertWeights,
    HeadNorms,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    NormWeights,
)
from slipstream.engine.cpu.packed_file import PackedFile
from slipstream.engine.cpu.weights import StoredWeights
from slipstream.kernels.cpu.memory import aligned_rows, round_up
from slipstream.kernels.cpu.operations import Format, TableFormat
from slipstream.kernels.cpu.pack import interleave_halves, pack, padded_floats
from slipstream.kernels.options import KernelOptions
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.kernels.stored import Weight, bfloat16_to_float32, round_to_bfloat16
from slipstream.model.heads import attention_rule, norms_in_kernel, query_scales
from slipstream.model.position import rotary_size, rotary_table
from slipstream.model.spec import ModelSpec


class CpuModel:
    """The weights of a model in packed form. The methods are those of `Transformer` that an engine
    needs around its steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        dtype: str,
        positions: int,
        options: KernelOptions = KernelOptions(),
        exact_activations: bool = False,
        packed: PackedFile | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """dtype: float32 or bfloat16; positions: the longest sequence; exact_activations: do not
        round activations to 8 bits where weights are quantised; packed: see `StoredWeights`;
        ranks: with several ranks, spec and weights are this rank's
        """
        self.ranks = ranks
        # the tokens whose logits this rank computes
        self.vocabulary = spec.vocabulary_of(ranks.rank, ranks.size)
        self.exact = exact_activations
        self.spec = spec
        self.dtype = dtype
        self.options = options
        self.format = Format.F32 if dtype == "float32" else Format.BF16
        self._source = StoredWeights(weights, dtype, packed)
        self.width = round_up(spec.hidden_size, 32)
        self.states_width = round_up(spec.embedding_width, 32)  # of what the head takes
        # rounded as the model was trained with it, in the type of its embedding
        self.embedding_scale = self._rounded(spec.embedding_scale)
        self._take_positions(positions)
        self._take_projections()
        self.embedding_norm = self._norm("transformer.ln_embed") if spec.embedding_norm else None
        self.slopes = self._slopes()
        self.layers = [self._layer(index) for index in range(spec.layers)]
        self.final_norm = self._norm("transformer.ln_f") if spec.final_norm else None
        self._take_head()
        self.score = self._score_layer()
        self._source.close()

    def _rounded(self, number: float) -> float:
        """Return a number in the type of the run."""
        exact = np.array([number], dtype=np.float32)
        if self.format is Format.BF16:
            exact = bfloat16_to_float32(round_to_bfloat16(exact))
        return float(exact[0])

    def _take_positions(self, positions: int) -> None:
        spec = self.spec
        self.learned_positions: np.ndarray | None = None
        # theta → cosine and sine, float32 [positions, half]
        self.rope: dict[float | None, tuple[np.ndarray, np.ndarray]] = {}
        if spec.position == "learned":
            shape = (spec.max_positions, spec.hidden_size)
            name = "transformer.position_embedding.weight"
            self.learned_positions = self._source.floats(name, shape, rounded=True)
        self.query_scales: np.ndarray | None = None
        if spec.query_scaling is not None:
            self.query_scales = query_scales(spec.query_scaling, positions)
        half = rotary_size(spec) // 2
        rotated = filter(spec.rotates_layer, range(spec.layers))
        for theta in {spec.theta_of_layer(index) for index in rotated}:
            cosine, signed_sine = rotary_table(spec, positions, theta)
            self.rope[theta] = (
                np.ascontiguousarray(cosine[:, :half]),
                np.ascontiguousarray(signed_sine[:, half:]),
            )

    def _take_projections(self) -> None:
        """Take the linear layers between embeddings and layers of another size."""
        spec = self.spec
        self.project_in: LinearWeights | None = None
        self.project_out: LinearWeights | None = None
        if spec.embedding_size:
            into = self._source.floats(
                "transformer.project_in.weight", (spec.hidden_size, spec.embedding_size)
            )
            self.project_in = LinearWeights((pack(into),), None, self.exact)
            name = "transformer.project_out"
            self.project_out = self._linear(name, spec.embedding_size, spec.hidden_size, False)

    def _slopes(self) -> np.ndarray | None:
        """Return the slopes of the position biases, float32 [heads]."""
        slopes = attention_rule(self.spec, 0, self.ranks).slopes
        if slopes is None:
            return None
        by_head = np.array(slopes.by_head, dtype=np.float32)
        return bfloat16_to_float32(round_to_bfloat16(by_head)) if slopes.rounded else by_head

    def _layer(self, index: int) -> LayerWeights:
        spec = self.spec
        name = f"transformer.layers.{index}"
        attended_norm = mlp_norm = post_norm = None
        if spec.output_norms:
            attended_norm = self._norm(f"{name}.post_layernorm")
            mlp_norm = self._norm(f"{name}.post_feedforward_layernorm")
        if not spec.shared_norm and spec.input_norms:
            between = "pre_feedforward_layernorm" if spec.output_norms else "post_layernorm"
            post_norm = self._norm(f"{name}.{between}")
        qkv = f"{name}.attention.qkv"
        dense = f"{name}.attention.dense"
        has_experts = spec.experts_of_layer(index) is not None
        in_rope = norms_in_kernel(spec, index)
        return LayerWeights(
            input_norm=self._norm(f"{name}.input_layernorm") if spec.input_norms else None,
            qkv=self._linear(qkv, spec.qkv_size, spec.hidden_size, spec.qkv_bias),
            dense=self._linear(dense, spec.hidden_size, spec.q_size, spec.o_proj_bias),
            up=None if has_experts else self._up(f"{name}.mlp"),
            down=None if has_experts else self._down(f"{name}.mlp"),
            mixture=self._mixture(f"{name}.mlp") if has_experts else None,
            post_norm=post_norm,
            attended_norm=attended_norm,
            mlp_norm=mlp_norm,
            q_norm=self._head_norm(f"{name}.attention.q_layernorm") if in_rope else None,
            k_norm=self._head_norm(f"{name}.attention.k_layernorm") if in_rope else None,
            head_norms=self._head_norms(index, f"{name}.attention"),
            query_scales=self.query_scales if spec.scales_queries(index) else None,
            sink_logits=self._sink_logits(f"{name}.attention"),
            rotates=spec.rotates_layer(index),
            theta=spec.theta_of_layer(index),
            rule=attention_rule(spec, index, self.ranks),
        )

    def _up(self, name: str) -> LinearWeights:
        spec = self.spec
        gated = spec.gated_mlp
        rows = 2 * spec.ffn_size if gated else spec.ffn_size
        own = f"{name}.{'gate_up' if gated else 'fc'}"
        return self._linear(own, rows, spec.hidden_size, spec.mlp_bias, gated)

    def _down(self, name: str) -> LinearWeights:
        spec = self.spec
        return self._linear(f"{name}.proj", spec.hidden_size, spec.ffn_size, spec.mlp_bias)

    def _mixture(self, name: str) -> MixtureWeights:
        spec = self.spec
        experts = spec.experts
        assert experts is not None
        hidden = spec.hidden_size
        size = experts.ffn_size
        held = experts.held_by(self.ranks.rank, self.ranks.size)
        mixture = MixtureWeights(
            router=self._router(f"{name}.router"),
            up=self._experts(f"{name}.experts.gate_up", len(held), 2 * size, hidden, True),
            down=self._experts(f"{name}.experts.proj", len(held), hidden, size, False),
            held=held,
            shared_up=None,
            shared_down=None,
            shared_router=None,
        )
        size = experts.shared_ffn_size
        if size:
            up = f"{name}.shared.gate_up"
            mixture.shared_up = self._linear(up, 2 * size, hidden, False, gated=True)
            mixture.shared_down = self._linear(f"{name}.shared.proj", hidden, size, False)
        if size and experts.shared_router:
            mixture.shared_router = self._linear(f"{name}.shared_share", 1, hidden, False)
        return mixture

    def _router(self, name: str) -> LinearWeights:
        experts = self.spec.experts
        assert experts is not None
        if not experts.exact_router:
            return self._linear(name, experts.count, self.spec.hidden_size, experts.biases)
        shape = (experts.count, self.spec.hidden_size)
        packed = pack(self._source.floats(f"{name}.weight", shape))
        bias: np.ndarray | None = None
        if experts.biases:
            found = self._source.floats(f"{name}.bias", (experts.count,))
            bias = padded_floats(found, packed.outputs)
        return LinearWeights((packed,), bias, self.exact)

    def _experts(
        self, name: str, count: int, outputs: int, inputs: int, gated: bool
    ) -> ExpertWeights:
        assert self.spec.experts is not None
        packed = self._source.matrices(name, count, outputs, inputs, gated)
        biases: np.ndarray | None = None
        if self.spec.experts.biases:
            found = self._source.floats(f"{name}.bias", (count * outputs,), rounded=True)
            rows = found.reshape(count, outputs)
            rows = np.stack([interleave_halves(row) for row in rows]) if gated else rows
            biases = aligned_rows(count, packed[0].outputs, np.float32)
            biases[:, : rows.shape[1]] = rows
        return ExpertWeights(packed, biases, self.exact)

    def _take_head(self) -> None:
        """Take the output layer and the table of embeddings, which may be the same weights."""
        spec = self.spec
        # a quantised engine holds a head of its own even if the embeddings are tied
        own = not spec.tied_embeddings or self._source.has("lm_head.weight")
        in_blocks = own and self._source.is_in_blocks("transformer.vocab_embedding")
        # whether the embedding has the exact numbers of a quantised head
        self.refines = own and spec.tied_embeddings and not in_blocks
        if not own and self.ranks.size > 1:
            self._divide_tied_head()
            return
        name = "lm_head" if own else "transformer.vocab_embedding"
        parts = self._source.matrix(name, len(self.vocabulary), spec.embedding_width)
        bias = self._head_bias(sum(part.outputs for part in parts))
        self.head = LinearWeights(parts, bias, self.exact)
        shape = (spec.vocab_size, spec.embedding_width)
        if in_blocks:
            parts = self._source.matrix("transformer.vocab_embedding", *shape)
            own = False
        if not own:
            [packed] = parts
            self.embedding = EmbeddingTable(
                TableFormat(packed.format), packed.address, packed.block_bytes, packed
            )
            return
        self._take_embedding()

    def _divide_tied_head(self) -> None:
        """Take this rank's rows of the embedding as its part of the output layer."""
        rows = self._take_embedding()
        own = pack(rows[self.vocabulary.start : self.vocabulary.stop])
        self.head = LinearWeights((own,), self._head_bias(own.outputs), self.exact)

    def _take_embedding(self) -> np.ndarray:
        """Take the embedding as rows, and return them."""
        shape = (self.spec.vocab_size, self.spec.embedding_width)
        rows = self._source.rows("transformer.vocab_embedding.weight", shape)
        is_float = rows.dtype == np.float32
        kind = TableFormat.F32_ROWS if is_float else TableFormat.BF16_ROWS
        self.embedding = EmbeddingTable(kind, int(rows.ctypes.data), rows.strides[0], rows)
        return rows

    def _linear(
        self, name: str, outputs: int, inputs: int, bias: bool, gated: bool = False
    ) -> LinearWeights:
        parts = self._source.matrix(name, outputs, inputs, gated)
        numbers: np.ndarray | None = None
        if bias:
            numbers = self._source.floats(f"{name}.bias", (outputs,), rounded=True)
            numbers = padded_floats(
                interleave_halves(numbers) if gated else numbers,
                sum(part.outputs for part in parts),
            )
        return LinearWeights(parts, numbers, self.exact)

    def _head_bias(self, outputs: int) -> np.ndarray | None:
        if not self.spec.head_bias:
            return None
        bias = self._source.floats("lm_head.bias", (len(self.vocabulary),), rounded=True)
        return padded_floats(bias, outputs)

    def _norm(self, name: str) -> NormWeights:
        spec = self.spec
        if not spec.norm_weights:
            ones = np.ones(spec.hidden_size, dtype=np.float32)
            return NormWeights(padded_floats(ones, self.width), None)
        weight = self._vector(f"{name}.weight") + spec.norm_offset
        bias: np.ndarray | None = None
        if spec.norm == "layer" and spec.norm_bias:
            bias = padded_floats(self._vector(f"{name}.bias"), self.width)
        return NormWeights(padded_floats(weight, self.width), bias)

    def _head_norm(self, name: str) -> np.ndarray:
        """Return the weights of an RMS norm of each head: float32 [head_size]."""
        spec = self.spec
        if spec.qk_norm_kind == "plain":
            return padded_floats(np.ones(spec.head_size, dtype=np.float32), spec.head_size)
        weight = self._source.floats(f"{name}.weight", (spec.head_size,))
        return padded_floats(weight + spec.norm_offset, spec.head_size)

    def _head_norms(self, index: int, name: str) -> HeadNorms | None:
        spec = self.spec
        if not spec.normalises_qk(index) or norms_in_kernel(spec, index):
            return None
        found: list[np.ndarray] = []
        biases: list[np.ndarray | None] = []
        sizes = zip(spec.qk_norm_sizes, (spec.q_size, spec.kv_size), strict=True)
        for letter, (stored, size) in zip("qk", sizes, strict=True):
            weight = np.ones(stored, dtype=np.float32)
            if spec.qk_norm_kind != "plain":
                weight = self._source.floats(f"{name}.{letter}_layernorm.weight", (stored,))
                weight = weight + spec.norm_offset
            found.append(np.tile(weight, size // stored))
            biases.append(None)
            if spec.qk_norm_bias:
                bias = self._source.floats(f"{name}.{letter}_layernorm.bias", (stored,))
                biases[-1] = np.tile(bias, size // stored)
        return HeadNorms(found[0], biases[0], found[1], biases[1], spec.qk_norm_kind == "all")

    def _sink_logits(self, name: str) -> np.ndarray | None:
        if not self.spec.sink_logits:
            return None
        return self._source.floats(f"{name}.sinks.weight", (self.spec.heads,)).copy()

    def _vector(self, name: str) -> np.ndarray:
        return self._source.floats(name, (self.spec.hidden_size,))

    def _score_layer(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return the output layer of a classifier: [hidden] float32 → [labels]."""
        spec = self.spec
        if not spec.labels:
            return None
        shape = (spec.labels, spec.hidden_size)
        weight = self._source.floats("score.weight", shape).copy()
        return partial(np.dot, weight)

    @property
    def queries_of_group(self) -> int:
        return self.spec.heads // self.spec.kv_heads

    @property
    def middle_width(self) -> int:
        """Elements of a row between the two linear layers of the widest MLP that all tokens take,
        with padding.
        """
        found = 32
        for layer in self.layers:
            downs = [layer.down]
            if layer.mixture is not None:
                downs.append(layer.mixture.shared_down)
            found = max(found, *(0 if down is None else down.inputs for down in downs))
        return found

    @property
    def expert_width(self) -> int:
        """Elements of a row between the two linear layers of an expert, with padding."""
        mixtures = [layer.mixture for layer in self.layers if layer.mixture is not None]
        return max((mixture.down.inputs for mixture in mixtures), default=0)

    @property
    def widths(self) -> tuple[int, ...]:
        """The sizes of the rows that operations handle."""
        spec = self.spec
        heads = (spec.q_size, spec.qkv_size)
        return (self.width, self.states_width, self.middle_width, self.expert_width, *heads)

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

    @property
    def cached_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        elements = 2 * self.spec.layers * self.spec.kv_heads * self.spec.head_size
        return elements * (4 if self.format is Format.F32 else 2)
