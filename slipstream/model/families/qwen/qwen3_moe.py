"""Qwen3 mixture of experts: Qwen3 with many small experts, eight per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, layer_numbers
from slipstream.model.families.qwen.qwen3 import WEIGHTS as QWEN3_WEIGHTS
from slipstream.model.spec import Experts, ModelSpec

_EXPERT = "mlp.experts.{expert}."
WEIGHTS = replace(
    QWEN3_WEIGHTS,
    layers={
        **QWEN3_WEIGHTS.layers,  # some layers may have a plain MLP
        "mlp.router": ("mlp.gate",),
        "mlp.experts.gate_up": (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
        "mlp.experts.proj": (f"{_EXPERT}down_proj",),
    },
)


def expert_layers(config: dict[str, Any]) -> tuple[bool, ...] | None:
    """Return the layers that have experts: every `decoder_sparse_step`-th one, without those in
    `mlp_only_layers`; None: all layers.
    """
    step = config.get("decoder_sparse_step") or 1
    without = config.get("mlp_only_layers") or []
    layers = layer_numbers(config)
    with_experts = tuple(layer not in without and (layer + 1) % step == 0 for layer in layers)
    return None if all(with_experts) else with_experts


def spec(config: dict[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    experts = Experts(
        config.get("num_experts") or config.get("num_local_experts") or 128,
        config.get("num_experts_per_tok") or 8,
        config.get("moe_intermediate_size") or 768,
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=expert_layers(config),
    )
    # one window for all layers, unlike the Qwen3 without experts
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return decoder_spec(
        "Qwen3MoeForCausalLM",
        config,
        default_positions=32768,
        qk_norm=True,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        sliding_window=window,
        experts=experts,
    )


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), spec, WEIGHTS, ("qwen3_moe",))
