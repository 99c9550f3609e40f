"""Gemma 2: Gemma with norms before and after attention and MLP, soft caps, and a window in every
other layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.gemma.gemma import gemma_spec
from slipstream.model.families.hf_config import layer_numbers, windowed_layers
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "pre_feedforward_layernorm": ("pre_feedforward_layernorm",),
        "post_feedforward_layernorm": ("post_feedforward_layernorm",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    windowed = tuple(layer % 2 == 0 for layer in layer_numbers(config))
    return gemma_spec(
        "Gemma2ForCausalLM",
        config,
        output_norms=True,
        attention_scale=(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        # absent means the class's default, null means no cap
        attention_softcap=float(config.get("attn_logit_softcapping", 50.0) or 0.0),
        final_softcap=float(config.get("final_logit_softcapping", 30.0) or 0.0),
        **windowed_layers(config, config.get("sliding_window", 4096), windowed),
    )


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), spec, WEIGHTS, ("gemma2",))
