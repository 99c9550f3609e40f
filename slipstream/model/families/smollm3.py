"""SmolLM3: Llama without RoPE in every fourth layer, and an optional window in those layers."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, rotated_layers, windowed_layers
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    config = {
        "rope_theta": 2_000_000.0,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        **config,
    }
    rotated = rotated_layers(config)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    attention_bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        "SmolLM3ForCausalLM",
        config,
        default_positions=32768,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rotated_layers=None if all(rotated) else rotated,
        **windowed_layers(config, window, tuple(not rotates for rotates in rotated)),
    )


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), spec, WEIGHTS, ("smollm3",))
