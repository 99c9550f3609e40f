"""Qwen 1: Llama with fused q, k and v, and other names. Served up to the trained length: beyond it
the model scales queries and RoPE by the length of the sequence.
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.dense": ("attn.c_proj",),
        "post_layernorm": ("ln_2",),
        "mlp.fc": ("mlp.w2",),
        "mlp.gate": ("mlp.w1",),
        "mlp.proj": ("mlp.c_proj",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    ignored=(r"transformer\.rotary_emb\.inv_freq", r".*\.attn\.masked_bias"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("Qwen", config, {"no_bias": True})
    renamed = {
        # the config counts gate and up projection together
        "intermediate_size": required(config, "intermediate_size") // 2,
        "head_dim": config.get("kv_channels"),
        "max_position_embeddings": config.get("seq_length") or 2048,
        "hidden_act": "silu",
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-6,
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct"),
    }
    return decoder_spec(
        "QWenLMHeadModel", {**config, **renamed}, default_positions=2048, qkv_bias=True
    )


FAMILY = Family("qwen", ("QWenLMHeadModel",), spec, WEIGHTS, ("qwen",))
