"""Nemotron 3 and 4, Minitron: layer norms with weights stored minus 1, squared ReLU, and RoPE on
half of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(LLAMA_WEIGHTS, layers={**LLAMA_WEIGHTS.layers, "mlp.fc": ("mlp.up_proj",)})


def spec(config: dict[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    factor = config.get("partial_rotary_factor") or config.get("rope_percent") or 0.5
    renamed = {
        "hidden_act": config.get("hidden_act") or "relu2",
        "rms_norm_eps": config.get("norm_eps") or 1e-5,
        "partial_rotary_factor": factor,
    }
    return decoder_spec(
        "NemotronForCausalLM",
        {**config, **renamed},
        default_positions=4096,
        gated_mlp=False,
        norm="layer",
        norm_offset=1.0,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


FAMILY = Family("nemotron", ("NemotronForCausalLM",), spec, WEIGHTS, ("nemotron",))
