"""Llama 1, 2, 3, 3.1, 3.2 and the many models that share its architecture (SmolLM2, TinyLlama, Yi,
...).
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="model.layers.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "post_layernorm": ("post_attention_layernorm",),
        "mlp.fc": ("mlp.gate_proj",),
        "mlp.gate": ("mlp.up_proj",),
        "mlp.proj": ("mlp.down_proj",),
    },
    outer={
        "transformer.vocab_embedding": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "lm_head": "lm_head",
    },
    ignored=(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        "LlamaForCausalLM",
        config,
        default_positions=2048,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), spec, WEIGHTS, ("llama",))
