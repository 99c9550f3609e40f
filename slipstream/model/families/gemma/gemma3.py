"""Gemma 3, text only: Gemma 2 with q and k normalised in place of soft caps, and another rotary
base in the layers with a window, five of six. Of a vision model the language model is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.gemma.gemma import gemma_spec
from slipstream.model.families.gemma.gemma2 import WEIGHTS as GEMMA2_WEIGHTS
from slipstream.model.families.hf_config import (
    layer_numbers,
    refuse_unusual,
    rope_by_window,
    windowed_layers,
)
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    GEMMA2_WEIGHTS,
    layers={
        **GEMMA2_WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_norm",),
        "attention.k_layernorm": ("self_attn.k_norm",),
    },
    ignored=(*GEMMA2_WEIGHTS.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    aliases=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.", ""),
    ),
)
# values that the configs of vision models leave out
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **(config.get("text_config") or config)}
    refuse_unusual("Gemma 3", config, {"attn_logit_softcapping": 0.0})
    pattern = config.get("sliding_window_pattern") or 6
    windowed = tuple((layer + 1) % pattern != 0 for layer in layer_numbers(config))
    rope, sliding_theta = rope_by_window(
        "Gemma 3",
        config,
        config.get("rope_theta") or 1_000_000.0,
        config.get("rope_local_base_freq") or 10000.0,
    )
    spec = gemma_spec(
        "Gemma3ForCausalLM",
        {**config, "rope_parameters": rope, "rope_scaling": None},
        output_norms=True,
        qk_norm=True,
        attention_scale=(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        final_softcap=float(config.get("final_logit_softcapping") or 0.0),
        sliding_rope_theta=sliding_theta,
        **windowed_layers(config, config.get("sliding_window", 4096), windowed),
    )
    # the config's length already contains the scaling of the layers without a window
    return replace(spec, max_positions=int(config["max_position_embeddings"]))


FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec,
    WEIGHTS,
    ("gemma3_text", "gemma3"),
)
