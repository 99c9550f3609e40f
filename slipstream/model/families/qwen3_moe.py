"""Qwen3 mixture of experts: Qwen3 with many small experts, of which each token takes eight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual
from slipstream.model.families.qwen3 import WEIGHTS as QWEN3_WEIGHTS
from slipstream.model.spec import Experts, ModelSpec

_EXPERT = "mlp.experts.{expert}."
WEIGHTS = replace(QWEN3_WEIGHTS, layers={
    **{module: sources for module, sources in QWEN3_WEIGHTS.layers.items() if not module.startswith("mlp.")},
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    "mlp.experts.proj": (f"{_EXPERT}down_proj",),
})


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("Qwen3 with experts", config, {"decoder_sparse_step": 1, "mlp_only_layers": []})
    attention_bias = bool(config.get("attention_bias", False))
    experts = Experts(config.get("num_experts") or config.get("num_local_experts") or 128,
                      config.get("num_experts_per_tok") or 8, config.get("moe_intermediate_size") or 768,
                      normalised=bool(config.get("norm_topk_prob", False)))
    # one window for all layers here, not the choice of layers that the dense Qwen3 has
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return decoder_spec(
        "Qwen3MoeForCausalLM", config, default_positions=32768, qk_norm=True, qkv_bias=attention_bias,
        dense_bias=attention_bias, sliding_window=window, experts=experts,
    )


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), spec, WEIGHTS, ("qwen3_moe",))
