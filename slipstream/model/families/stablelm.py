"""StableLM 3B and StableLM 2: Llama with layer norms and RoPE on a quarter of a head. The 12B model
has parallel attention and MLP, and a norm for each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_layernorm.norms.{head}",),
        "attention.k_layernorm": ("self_attn.k_layernorm.norms.{head}",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    parallel = bool(config.get("use_parallel_residual", False))
    factor = config.get("partial_rotary_factor") or config.get("rope_pct") or 0.25
    renamed = {
        "rms_norm_eps": config.get("layer_norm_eps") or config.get("norm_eps") or 1e-5,
        "partial_rotary_factor": factor,
    }
    return decoder_spec(
        "StableLmForCausalLM",
        {**config, **renamed},
        default_positions=4096,
        norm="layer",
        parallel_residual=parallel,
        shared_norm=parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        qk_norm=bool(config.get("qk_layernorm", False)),
        qk_norm_kind="head",
    )


FAMILY = Family(
    "stablelm",
    ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    spec,
    WEIGHTS,
    ("stablelm", "stablelm_epoch"),
)
