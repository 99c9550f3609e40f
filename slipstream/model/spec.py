"""The description of a model as plain data: the sizes and options of one transformer.

Every supported family is a set of values of `ModelSpec`. The JSON form (`to_config`, `from_config`)
uses the key names of TensorRT-LLM's unified checkpoint where it has one, so that tools which read
those files find what they expect.

Tensor names, in a checkpoint and in an engine. Weights are [out_features, in_features]. Names are
`transformer.layers.N.` plus:

    input_layernorm.weight        [hidden]
    attention.qkv.weight          [(heads + 2 kv_heads) * head_size, hidden]
    attention.q_layernorm.weight  [head_size]   with qk-norm; k_layernorm likewise
                                  [heads * head_size] and [kv_heads * head_size] if heads have
                                  weights of their own, see `qk_norm_kind`
    attention.sinks.weight        [heads]   with sink logits

with latent attention in place of qkv, where a query has plain_size elements, then rope_size:

    attention.q_a.weight          [query_rank, hidden]   if queries have a latent vector
    attention.q_a_layernorm.weight  [query_rank]
    attention.q_b.weight          [heads * query_size, query_rank or hidden]
    attention.kv_a.weight         [kv_rank + rope_size, hidden]
    attention.kv_a_layernorm.weight  [kv_rank]
    attention.kv_b.weight         [heads * (plain_size + value_size), kv_rank]

then for all:

    attention.dense.weight        [hidden, heads * head_size]   the output projection (o_proj);
                                  with latent attention heads * value_size
    post_layernorm.weight         [hidden]
    pre_feedforward_layernorm, post_feedforward_layernorm
                                  with output norms: post_layernorm then normalises the output of
                                  attention, and these are around the MLP
    mlp.fc.weight                 [ffn, hidden]   the activated half
    mlp.gate.weight               [ffn, hidden]   the multiplied half, gated MLP only
    mlp.proj.weight               [hidden, ffn]

and in place of fc, gate and proj, where a layer has experts, whose rows follow each other:

    mlp.router.weight             [experts, hidden]
    mlp.router_correction.weight  [experts]   always float32; if routing is corrected
    mlp.experts.gate_up.weight    [experts * 2 * expert_ffn, hidden]
    mlp.experts.proj.weight       [experts * hidden, expert_ffn]
    mlp.shared.gate_up.weight     [2 * shared_ffn, hidden]   the expert of all tokens, if any
    mlp.shared.proj.weight        [hidden, shared_ffn]
    mlp.shared_share.weight       [1, hidden]   the router of the shared expert, if it has one

Outside the layers:

    transformer.vocab_embedding.weight     [vocab, embedding]   embedding = hidden, unless with:
    transformer.project_in.weight          [hidden, embedding]
    transformer.project_out.weight         [embedding, hidden]
    transformer.position_embedding.weight  [positions, hidden]   learned positions only
    transformer.type_embedding.weight      [token_types, hidden]
    transformer.ln_embed.weight            [hidden]   if the embeddings are normalised
    transformer.ln_f.weight                [hidden]   if there is a final norm
    lm_head.weight                         [vocab, embedding]   absent if the embeddings are tied

Linear layers have a `.bias` as well if the spec says so, norms if they are layer norms with a bias.
An engine holds `mlp.gate_up.weight` [2 * ffn, hidden] (rows of fc, then rows of gate) in place of
the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from slipstream.model.options import (
    Alibi,
    ClampedGate,
    Experts,
    LatentAttention,
    QueryScaling,
    RopeKind,
    RopeScaling,
    check_sizes,
)

__all__ = [
    "Alibi",
    "ClampedGate",
    "Experts",
    "LatentAttention",
    "ModelSpec",
    "QueryScaling",
    "RopeKind",
    "RopeScaling",
]

# Several times what any model has: a config with larger counts is damaged.
MAX_LAYERS = 4096
_FP8_SENSITIVE_BELOW = 2048  # hidden size
# A rank's part of a large vocabulary is a multiple of this, as a GPU's kernels require.
_VOCABULARY_MULTIPLE = 64
_ALIGNED_VOCABULARY_FROM = 1024  # tokens of a part; smaller parts are not rounded


# shared: the same weights for all heads; head: weights for each head; all: one norm over the heads
# together; plain: each head without weights, in layers with RoPE only
QkNormKind = Literal["shared", "head", "all", "plain"]


@dataclass(frozen=True)
class ModelSpec:
    architecture: str  # the Hugging Face class name, such as "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    gated_mlp: bool = True
    clamped_gate: ClampedGate | None = None  # with activation "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0  # added to the stored weights of norms
    norm_weights: bool = True  # False: norms have neither weights nor biases
    norm_bias: bool = True  # whether layer norms have a bias
    input_norms: bool = True  # False: attention and MLP take the residual stream as it is
    output_norms: bool = False  # whether the outputs of attention and MLP are normalised
    parallel_residual: bool = False  # whether the MLP takes the input of attention, not its output
    shared_norm: bool = False  # with a parallel residual: one norm before both, no post_layernorm
    embedding_scale: float = 1.0
    embedding_norm: bool = False  # whether the embeddings are normalised
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    logit_scale: float = 1.0
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_size)
    scale_by_layer: bool = False  # whether the scores of layer i are divided by i + 1, too
    # whether each head has a logit that takes part in the softmax and adds nothing to the result
    sink_logits: bool = False
    attention_softcap: float = 0.0  # bound of the scores; 0: none
    final_softcap: float = 0.0  # bound of the logits; 0: none
    latent: LatentAttention | None = None  # one KV head, of a size that this option determines
    attention_chunk: int | None = (
        None  # tokens attend within chunks of this length; None: no chunks
    )
    query_scaling: QueryScaling | None = None
    position: Literal["rope", "learned", "alibi"] = "rope"
    alibi: Alibi | None = None  # with position "alibi"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_rope_theta: float | None = None  # theta of layers with a window; None: as the others
    rotary_fraction: float = 1.0  # leading share of a head that is rotated
    rotated_layers: tuple[bool, ...] | None = None  # layers with RoPE; None: all
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qkv_clip: float = 0.0  # bound of queries, keys and values; 0: none
    qk_norm: bool = False
    qk_norm_kind: QkNormKind = "shared"
    qk_norm_bias: bool = False
    tied_embeddings: bool = False
    causal: bool = True  # False: tokens attend to the whole prompt, which is computed in one step
    token_types: int = 0  # kinds of tokens, with an embedding each; all tokens have the first one
    sliding_window: int | None = None  # tokens that a token attends to, with itself
    sliding_layers: tuple[bool, ...] | None = None  # layers with the window; None: all
    experts: Experts | None = None
    norms_after: bool = False  # post-norm: each norm normalises the residual stream itself
    final_norm: bool = True
    embedding_size: int = 0  # 0: the hidden size; else linear layers project from and to it
    labels: int = 0  # outputs of the score layer; 0: there is none
    # with labels: whether a linear layer and tanh precede the score layer, and both have biases
    score_dense: bool = False

    def __post_init__(self) -> None:
        check_sizes(
            self,
            "vocab_size",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "head_size",
            "ffn_size",
            "max_positions",
        )
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(
                f"rotary_fraction is {self.rotary_fraction}, and must be above 0 and at most 1"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        latent = self.latent
        if latent is not None and (self.kv_heads, self.head_size) != (1, latent.cached_size):
            raise ValueError(f"latent attention has one KV head of {latent.cached_size} elements")
        self._check_layer_lists()
        self._check_norms()

    def _check_layer_lists(self) -> None:
        if self.sliding_layers is not None and len(self.sliding_layers) != self.layers:
            raise ValueError(
                f"sliding_layers has {len(self.sliding_layers)} layers, the model has {self.layers}"
            )
        if self.rotated_layers is not None and len(self.rotated_layers) != self.layers:
            raise ValueError(
                f"rotated_layers has {len(self.rotated_layers)} layers, the model has {self.layers}"
            )
        if (self.position == "alibi") != (self.alibi is not None):
            raise ValueError("position 'alibi' and the option alibi go together")
        expert_layers = self.experts.layers if self.experts is not None else None
        if expert_layers is not None and len(expert_layers) != self.layers:
            raise ValueError(
                f"experts.layers has {len(expert_layers)} layers, the model has {self.layers}"
            )

    def _check_norms(self) -> None:
        others = self.output_norms or self.parallel_residual or self.final_norm
        if self.norms_after and (others or self.norm != "layer"):
            raise ValueError("norms_after go with layer norm, a plain residual and no final norm")
        if not self.input_norms and not self.output_norms:
            raise ValueError("without input_norms there must be output_norms")
        if self.residual_scale != 1.0 and (self.output_norms or self.norms_after):
            raise ValueError("residual_scale goes with norms before attention and MLP only")
        if self.output_norms if self.parallel_residual else self.shared_norm:
            raise ValueError(
                "output_norms go with a sequential residual, shared_norm with a parallel one"
            )

    @property
    def q_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def attended_size(self) -> int:
        """Elements that attention returns for a token: the inputs of the output projection."""
        latent = self.latent
        return self.heads * (self.head_size if latent is None else latent.value_size)

    @property
    def cached_vectors(self) -> int:
        """Vectors of a KV head that the cache holds for a token: a key and a value, or one for
        both.
        """
        return 2 if self.latent is None else 1

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def fp8_sensitive(self) -> bool:
        """Return whether e4m3 costs accuracy: then few linear layers have e4m3 weights, and none
        takes e4m3 activations.
        """
        return self.hidden_size < _FP8_SENSITIVE_BELOW

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """The sizes of every kind of MLP that the model has."""
        experts = self.experts
        if experts is None:
            return (self.ffn_size,)
        sizes = [experts.ffn_size]
        if experts.shared_ffn_size:
            sizes.append(experts.shared_ffn_size)
        if experts.layers is not None:
            sizes.append(self.ffn_size)
        return tuple(sizes)

    def experts_of_layer(self, layer: int) -> Experts | None:
        has_some = self.experts is not None and (
            self.experts.layers is None or self.experts.layers[layer]
        )
        return self.experts if has_some else None

    def window_of_layer(self, layer: int) -> int | None:
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if slides else None

    def scale_of_layer(self, layer: int) -> float:
        """Return the factor of a layer's scores."""
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def rotates_layer(self, layer: int) -> bool:
        """Return whether a layer has RoPE."""
        return self.position == "rope" and (
            self.rotated_layers is None or self.rotated_layers[layer]
        )

    def chunk_of_layer(self, layer: int) -> int | None:
        """Return the length of a layer's chunks of attention. Layers without RoPE have none."""
        return self.attention_chunk if self.rotates_layer(layer) else None

    def scales_queries(self, layer: int) -> bool:
        """Return whether a layer scales its queries by position."""
        scaling = self.query_scaling
        return scaling is not None and not (scaling.unrotated_only and self.rotates_layer(layer))

    def normalises_qk(self, layer: int) -> bool:
        """Return whether a layer normalises queries and keys."""
        return self.qk_norm and (self.qk_norm_kind != "plain" or self.rotates_layer(layer))

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """The number of weights of the norms of queries and of keys."""
        if self.qk_norm_kind == "shared":
            return self.head_size, self.head_size
        return self.q_size, self.kv_size

    @property
    def qk_norm_per_head(self) -> bool:
        """Return whether each head has its own weights of the norms of queries and keys."""
        return self.qk_norm_kind in ("head", "all")

    @property
    def has_layer_norm_of_all_heads(self) -> bool:
        """Return whether one layer norm covers all queries, and one all keys."""
        return self.qk_norm and self.qk_norm_kind == "all" and self.norm == "layer"

    def kv_heads_of(self, rank: int, ranks: int) -> range:
        """Return the KV heads of a rank. With fewer heads than ranks, several ranks have the same
        one.
        """
        if self.kv_heads < ranks:
            head = rank * self.kv_heads // ranks
            return range(head, head + 1)
        each = self.kv_heads // ranks
        return range(rank * each, (rank + 1) * each)

    def vocabulary_of(self, rank: int, ranks: int) -> range:
        """Return the tokens whose logits a rank computes. The last ranks may have fewer."""
        each = -(-self.vocab_size // ranks)
        if each >= _ALIGNED_VOCABULARY_FROM:
            each += -each % _VOCABULARY_MULTIPLE
        return range(min(rank * each, self.vocab_size), min((rank + 1) * each, self.vocab_size))

    def theta_of_layer(self, layer: int) -> float | None:
        """Return the rotary base of a layer that has its own; None: the model's."""
        return self.sliding_rope_theta if self.window_of_layer(layer) is not None else None

    def parameters(self) -> int:
        """Return the number of weights, which a decode step reads."""
        attention = self._attention_inputs() + self.attended_size * self.hidden_size
        ffn = 0
        for layer in range(self.layers):
            experts = self.experts_of_layer(layer)
            if experts is None:
                ffn += self.ffn_size
            else:
                ffn += experts.count * experts.ffn_size + experts.shared_ffn_size
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * ffn
        embedding = (
            self.vocab_size * self.embedding_width + 2 * self.embedding_size * self.hidden_size
        )
        head = 0 if self.tied_embeddings else self.vocab_size * self.embedding_width
        return self.layers * attention + mlp + embedding + head

    def _attention_inputs(self) -> int:
        """Return the number of a layer's weights that make queries, keys and values."""
        latent = self.latent
        if latent is None:
            return self.hidden_size * self.qkv_size
        queries = (latent.query_rank or self.hidden_size) * self.heads * latent.query_size
        keys = latent.kv_rank * self.heads * (latent.plain_size + latent.value_size)
        return queries + keys + self.hidden_size * (latent.query_rank + latent.cached_size)

    def to_config(self) -> dict[str, Any]:
        """Return the JSON form, under the unified checkpoint's key names."""
        return {key: _plain(getattr(self, field)) for field, key in _CONFIG_KEYS.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSpec:
        """Read the form that `to_config` writes; other keys are ignored."""
        missing = [key for key in _REQUIRED_KEYS if key not in config]
        if missing:
            raise ValueError(f"model config lacks {', '.join(missing)}")
        values = {field: config[key] for field, key in _CONFIG_KEYS.items() if key in config}
        scaling = values.get("rope_scaling")
        if scaling is not None:
            scaling = dict(scaling)
            for factors in ("short_factors", "long_factors"):
                scaling[factors] = tuple(scaling.get(factors, ()))
            values["rope_scaling"] = RopeScaling(**scaling)
        for name in ("sliding_layers", "rotated_layers"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        for name, kind in _GROUPS.items():
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        if values.get("experts") is not None:
            layers = values["experts"].get("layers")
            values["experts"] = Experts(**{**values["experts"], "layers": layers and tuple(layers)})
        return cls(**values)


_CONFIG_KEYS = {
    "architecture": "architecture",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_size",
    "ffn_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "gated_mlp": "gated_mlp",
    "clamped_gate": "clamped_gate",
    "norm": "norm",
    "norm_epsilon": "norm_epsilon",
    "norm_offset": "norm_offset",
    "norm_weights": "norm_weights",
    "norm_bias": "norm_bias",
    "input_norms": "input_norms",
    "output_norms": "inter_layernorms",
    "parallel_residual": "parallel_attention",
    "shared_norm": "shared_norm",
    "embedding_scale": "embedding_scale",
    "embedding_norm": "embedding_norm",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
    "attention_scale": "attention_scale",
    "scale_by_layer": "scale_attn_by_inverse_layer_idx",
    "sink_logits": "attention_sinks",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "latent": "latent_attention",
    "attention_chunk": "attention_chunk_size",
    "query_scaling": "query_scaling",
    "position": "position_embedding_type",
    "alibi": "alibi",
    "rope_theta": "rotary_base",
    "rope_scaling": "rotary_scaling",
    "sliding_rope_theta": "rope_local_base_freq",
    "rotary_fraction": "rotary_pct",
    "rotated_layers": "rotated_layers",
    "qkv_bias": "attn_bias",
    "o_proj_bias": "dense_bias",
    "mlp_bias": "mlp_bias",
    "head_bias": "head_bias",
    "qkv_clip": "clip_qkv",
    "qk_norm": "qk_layernorm",
    "qk_norm_kind": "qk_norm_kind",
    "qk_norm_bias": "qk_norm_bias",
    "tied_embeddings": "share_embedding_table",
    "sliding_window": "sliding_window",
    "sliding_layers": "sliding_layers",
    "experts": "moe",
    "norms_after": "norms_after",
    "final_norm": "final_norm",
    "embedding_size": "word_embed_proj_dim",
    "labels": "num_labels",
    "causal": "is_causal",
    "token_types": "type_vocab_size",
    "score_dense": "score_dense",
}
# groups of options that hold plain values only
_GROUPS: dict[str, Callable[..., object]] = {
    "alibi": Alibi,
    "clamped_gate": ClampedGate,
    "latent": LatentAttention,
    "query_scaling": QueryScaling,
}
_REQUIRED_KEYS = [
    _CONFIG_KEYS[name]
    for name in (
        "architecture",
        "vocab_size",
        "hidden_size",
        "layers",
        "heads",
        "kv_heads",
        "head_size",
        "ffn_size",
        "max_positions",
    )
]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value
