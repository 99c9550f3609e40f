"""MPT: position biases (ALiBi), layer norms without bias, no biases."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.spec import Alibi, ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.blocks.{layer}.",
    layers={
        "input_layernorm": ("norm_1",),
        "attention.qkv": ("attn.Wqkv",),
        "attention.dense": ("attn.out_proj",),
        "post_layernorm": ("norm_2",),
        "mlp.fc": ("ffn.up_proj",),
        "mlp.proj": ("ffn.down_proj",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.ln_f": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    optional_prefix="transformer.",
)


def spec(config: dict[str, Any]) -> ModelSpec:
    attention = config.get("attn_config") or {}
    refuse_unusual("MPT", config, {"no_bias": True, "logit_scale": None})
    refuse_unusual(
        "MPT",
        attention,
        {
            "alibi": True,
            "attn_type": "multihead_attention",
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
        },
    )
    hidden = required(config, "d_model")
    scale = attention.get("softmax_scale")
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": required(config, "n_heads"),
        "num_hidden_layers": required(config, "n_layers"),
        "intermediate_size": hidden * int(config.get("expansion_ratio") or 4),
        "max_position_embeddings": config.get("max_seq_len"),
        "hidden_act": "gelu",
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return decoder_spec(
        "MPTForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        norm_bias=False,
        position="alibi",
        alibi=Alibi(float(attention.get("alibi_bias_max") or 8.0)),
        attention_scale=None if scale is None else float(scale),
        qkv_clip=float(attention.get("clip_qkv") or 0.0),
    )


FAMILY = Family("mpt", ("MPTForCausalLM", "MptForCausalLM"), spec, WEIGHTS, ("mpt",))
