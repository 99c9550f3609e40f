"""GPT-2: learned positions, layer norm, biases everywhere, weights stored transposed."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import activation, refuse_unusual, required
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.dense": ("attn.c_proj",),
        "post_layernorm": ("ln_2",),
        "mlp.fc": ("mlp.c_fc",),
        "mlp.proj": ("mlp.c_proj",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.position_embedding": "transformer.wpe",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    transposed=frozenset({"attention.qkv", "attention.dense", "mlp.fc", "mlp.proj"}),
    # the causal mask, saved as a buffer
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    optional_prefix="transformer.",
)


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("GPT-2", config, {"add_cross_attention": False})
    hidden = required(config, "n_embd")
    heads = required(config, "n_head")
    return ModelSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden,
        layers=required(config, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=config.get("n_inner") or 4 * hidden,
        max_positions=config.get("n_positions") or config.get("n_ctx") or 1024,
        activation=activation(config.get("activation_function") or "gelu_new"),
        gated_mlp=False,
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        scale_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx", False)),
        norm="layer",
        norm_epsilon=float(config.get("layer_norm_epsilon") or 1e-5),
        position="learned",
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


FAMILY = Family("gpt2", ("GPT2LMHeadModel",), spec, WEIGHTS, ("gpt2",))
