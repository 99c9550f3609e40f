"""Qwen3: Qwen2 without the biases, with q and k normalised per head and a head size of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, sliding_options
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_norm",),
        "attention.k_layernorm": ("self_attn.k_norm",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    sliding = sliding_options(config)
    return decoder_spec(
        "Qwen3ForCausalLM",
        config,
        default_positions=32768,
        head_size=config.get("head_dim") or 128,
        qk_norm=True,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        **sliding,
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), spec, WEIGHTS, ("qwen3",))
