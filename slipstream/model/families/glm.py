"""ChatGLM 2 and 3, GLM-4: RoPE on neighbouring columns of half of a head, fused gate and up
projections. The newer GLM-4 has norms behind attention and MLP as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.families.phi3 import FUSED_MLP_ROWS
from slipstream.model.families.row_order import paired_rotation
from slipstream.model.spec import ModelSpec

_ROWS = {**FUSED_MLP_ROWS, "attention.qkv": paired_rotation}
CHATGLM_WEIGHTS = WeightMap(
    layer_prefix="transformer.encoder.layers.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.dense": ("self_attention.dense",),
        "post_layernorm": ("post_attention_layernorm",),
        "mlp.fc": ("mlp.dense_h_to_4h",),
        "mlp.gate": ("mlp.dense_h_to_4h",),
        "mlp.proj": ("mlp.dense_4h_to_h",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.embedding.word_embeddings",
        "transformer.ln_f": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    },
    rows=_ROWS,
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
)
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "mlp.fc": ("mlp.gate_up_proj",),
        "mlp.gate": ("mlp.gate_up_proj",),
    },
    rows=_ROWS,
)
WEIGHTS_4 = replace(
    WEIGHTS,
    layers={
        **WEIGHTS.layers,
        "post_layernorm": ("post_self_attn_layernorm",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("post_mlp_layernorm",),
    },
)


def chatglm_spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual(
        "ChatGLM",
        config,
        {
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "original_rope": True,
            "post_layer_norm": True,
            "pre_seq_len": None,
            "rmsnorm": True,
        },
    )
    heads = required(config, "num_attention_heads")
    few = config.get("multi_query_attention", False)
    renamed = {
        "vocab_size": config.get("padded_vocab_size") or required(config, "vocab_size"),
        "num_hidden_layers": required(config, "num_layers"),
        "num_key_value_heads": required(config, "multi_query_group_num") if few else heads,
        "intermediate_size": required(config, "ffn_hidden_size"),
        "head_dim": config.get("kv_channels"),
        "max_position_embeddings": config.get("seq_length"),
        "rms_norm_eps": config.get("layernorm_epsilon") or 1e-5,
        "rope_theta": 10000.0 * float(config.get("rope_ratio") or 1.0),
        "partial_rotary_factor": 0.5,
    }
    return decoder_spec(
        "ChatGLMForConditionalGeneration",
        {**config, **renamed},
        default_positions=2048,
        qkv_bias=bool(config.get("add_qkv_bias", False)),
    )


def spec(config: dict[str, Any]) -> ModelSpec:
    return _glm_spec("GlmForCausalLM", config)


def spec_4(config: dict[str, Any]) -> ModelSpec:
    return _glm_spec("Glm4ForCausalLM", config, output_norms=True)


def _glm_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    config = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        **config,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 0.5,
    }
    return decoder_spec(
        architecture,
        config,
        default_positions=131072,
        qkv_bias=bool(config.get("attention_bias", True)),
        **options,
    )


FAMILIES = (
    Family(
        "chatglm",
        ("ChatGLMForConditionalGeneration", "ChatGLMModel"),
        chatglm_spec,
        CHATGLM_WEIGHTS,
        ("chatglm",),
    ),
    Family("glm", ("GlmForCausalLM",), spec, WEIGHTS, ("glm",)),
    Family("glm4", ("Glm4ForCausalLM",), spec_4, WEIGHTS_4, ("glm4",)),
)
