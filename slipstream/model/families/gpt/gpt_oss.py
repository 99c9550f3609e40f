"""gpt-oss: experts with biases and a bounded gate, a sink logit for each head, and a sliding window
in every other layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, layer_numbers, windowed_layers
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.families.row_order import paired_expert_halves
from slipstream.model.spec import ClampedGate, Experts, ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **{
            module: sources
            for module, sources in LLAMA_WEIGHTS.layers.items()
            if not module.startswith("mlp.")
        },
        "attention.sinks": ("self_attn.sinks",),
        "mlp.router": ("mlp.router",),
        "mlp.experts.gate_up": ("mlp.experts.gate_up_proj",),
        "mlp.experts.proj": ("mlp.experts.down_proj",),
    },
    transposed=frozenset({"mlp.experts.gate_up", "mlp.experts.proj"}),
    rows={"mlp.experts.gate_up": paired_expert_halves},
    aliases=(("_proj_bias", "_proj.bias"),),  # of experts
    bare_weights=(".self_attn.sinks", ".experts.gate_up_proj", ".experts.down_proj"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    config = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        **config,
        "intermediate_size": config.get("intermediate_size") or 2880,
    }
    window = config.get("sliding_window", 128)
    slides = tuple(layer % 2 == 0 for layer in layer_numbers(config))
    biases = config.get("attention_bias", True) is not False
    experts = Experts(
        config.get("num_local_experts") or config.get("num_experts") or 128,
        config.get("num_experts_per_tok") or config.get("experts_per_token") or 4,
        config["intermediate_size"],
        biases=True,
    )
    return decoder_spec(
        "GptOssForCausalLM",
        config,
        default_positions=131072,
        qkv_bias=biases,
        o_proj_bias=biases,
        sink_logits=True,
        clamped_gate=ClampedGate(
            float(config.get("swiglu_alpha") or 1.702), float(config.get("swiglu_limit") or 7.0)
        ),
        experts=experts,
        **windowed_layers(config, window, slides),
    )


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), spec, WEIGHTS, ("gpt_oss",))
