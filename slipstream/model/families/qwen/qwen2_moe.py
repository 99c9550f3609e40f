"""Qwen2 and Qwen1.5 mixture of experts: Qwen2 with many small experts and a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual
from slipstream.model.families.qwen.qwen3_moe import WEIGHTS as QWEN3_WEIGHTS
from slipstream.model.families.qwen.qwen3_moe import expert_layers
from slipstream.model.spec import Experts, ModelSpec

WEIGHTS = replace(
    QWEN3_WEIGHTS,
    layers={
        **QWEN3_WEIGHTS.layers,
        "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared.proj": ("mlp.shared_expert.down_proj",),
        "mlp.shared_share": ("mlp.shared_expert_gate",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("Qwen2 with experts", config, {"use_sliding_window": False})
    experts = Experts(
        config.get("num_experts") or 60,
        config.get("num_experts_per_tok") or 4,
        config.get("moe_intermediate_size") or 1408,
        normalised=bool(config.get("norm_topk_prob", False)),
        shared_ffn_size=config.get("shared_expert_intermediate_size") or 5632,
        layers=expert_layers(config),
    )
    return decoder_spec(
        "Qwen2MoeForCausalLM",
        config,
        default_positions=32768,
        qkv_bias=bool(config.get("qkv_bias", True)),
        experts=experts,
    )


FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), spec, WEIGHTS, ("qwen2_moe",))
