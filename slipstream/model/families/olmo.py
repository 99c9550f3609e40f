"""OLMo: layer norms without weights. OLMo 2 and 3: norms behind attention and MLP in place of those
before, and one norm over all queries and one over all keys. OLMo 3 has a window in most layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import (
    decoder_spec,
    layer_numbers,
    rope_by_window,
    windowed_layers,
)
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS_2 = replace(
    WEIGHTS,
    layers={
        **WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_norm",),
        "attention.k_layernorm": ("self_attn.k_norm",),
        "post_feedforward_layernorm": ("post_feedforward_layernorm",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    return _olmo_spec(
        "OlmoForCausalLM",
        {**config, "rms_norm_eps": 1e-5},
        norm="layer",
        norm_weights=False,
        qkv_clip=float(config.get("clip_qkv") or 0.0),
    )


def spec_2(config: dict[str, Any]) -> ModelSpec:
    return _post_norm_spec("Olmo2ForCausalLM", config)


def spec_3(config: dict[str, Any]) -> ModelSpec:
    theta = float(config.get("rope_theta") or 500_000.0)
    rope, sliding_theta = rope_by_window("OLMo 3", config, theta, theta)
    windowed = tuple((layer + 1) % 4 != 0 for layer in layer_numbers(config))
    return _post_norm_spec(
        "Olmo3ForCausalLM",
        {**config, "rope_parameters": rope, "rope_scaling": None},
        sliding_rope_theta=sliding_theta,
        **windowed_layers(config, config.get("sliding_window", 4096), windowed),
    )


def _post_norm_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    return _olmo_spec(
        architecture,
        {"rms_norm_eps": 1e-5, **config},
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        qk_norm_kind="all",
        **options,
    )


def _olmo_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        architecture,
        config,
        default_positions=2048,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        **options,
    )


FAMILIES = (
    Family("olmo", ("OlmoForCausalLM",), spec, WEIGHTS, ("olmo",)),
    Family("olmo2", ("Olmo2ForCausalLM",), spec_2, WEIGHTS_2, ("olmo2",)),
    Family("olmo3", ("Olmo3ForCausalLM",), spec_3, WEIGHTS_2, ("olmo3",)),
)
