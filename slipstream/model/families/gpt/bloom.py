"""BLOOM: position biases (ALiBi), normalised embeddings, biases everywhere."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.families.row_order import grouped_heads
from slipstream.model.spec import Alibi, ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.dense": ("self_attention.dense",),
        "post_layernorm": ("post_attention_layernorm",),
        "mlp.fc": ("mlp.dense_h_to_4h",),
        "mlp.proj": ("mlp.dense_4h_to_h",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.word_embeddings",
        "transformer.ln_embed": "transformer.word_embeddings_layernorm",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    rows={"attention.qkv": grouped_heads},
    optional_prefix="transformer.",
)


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("BLOOM", config, {"apply_residual_connection_post_layernorm": False})
    hidden = config.get("hidden_size") or required(config, "n_embed")
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": config.get("n_head") or required(config, "num_attention_heads"),
        "num_hidden_layers": config.get("n_layer") or required(config, "num_hidden_layers"),
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_position_embeddings": config.get("seq_length"),
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return decoder_spec(
        "BloomForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        embedding_norm=True,
        position="alibi",
        alibi=Alibi(),
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
    )


FAMILY = Family("bloom", ("BloomForCausalLM",), spec, WEIGHTS, ("bloom",))
