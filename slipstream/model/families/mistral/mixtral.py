"""Mixtral: Mistral with a mixture of experts, two per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, required
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import Experts, ModelSpec

_EXPERT = "block_sparse_moe.experts.{expert}."
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **{
            module: sources
            for module, sources in LLAMA_WEIGHTS.layers.items()
            if not module.startswith("mlp.")
        },
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up": (f"{_EXPERT}w1", f"{_EXPERT}w3"),
        "mlp.experts.proj": (f"{_EXPERT}w2",),
    },
)


def spec(config: dict[str, Any]) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0, **config}
    experts = Experts(
        config.get("num_local_experts") or 8,
        config.get("num_experts_per_tok") or 2,
        required(config, "intermediate_size"),
    )
    return decoder_spec(
        "MixtralForCausalLM",
        config,
        default_positions=131072,
        sliding_window=config.get("sliding_window"),
        experts=experts,
    )


FAMILY = Family("mixtral", ("MixtralForCausalLM",), spec, WEIGHTS, ("mixtral",))
