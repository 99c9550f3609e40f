"""DeepSeek V2 and V3, and models of their classes: latent attention, and many small experts that
are chosen from a few groups, beside one for every token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import (
    decoder_spec,
    layer_numbers,
    refuse_unusual,
    required,
)
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.families.row_order import paired_latent_key, paired_latent_queries
from slipstream.model.spec import Experts, LatentAttention, ModelSpec

_EXPERT = "mlp.experts.{expert}."
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **{
            module: sources
            for module, sources in LLAMA_WEIGHTS.layers.items()
            if module != "attention.qkv"
        },
        "attention.q_a": ("self_attn.q_a_proj",),
        "attention.q_a_layernorm": ("self_attn.q_a_layernorm",),
        "attention.q_b": ("self_attn.q_b_proj",),
        "attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
        "attention.kv_a_layernorm": ("self_attn.kv_a_layernorm",),
        "attention.kv_b": ("self_attn.kv_b_proj",),
        "mlp.router": ("mlp.gate",),
        "mlp.router_correction": ("mlp.gate.e_score_correction_bias",),
        "mlp.experts.gate_up": (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
        "mlp.experts.proj": (f"{_EXPERT}down_proj",),
        "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.proj": ("mlp.shared_experts.down_proj",),
    },
    rows={"attention.q_b": paired_latent_queries, "attention.kv_a": paired_latent_key},
    # models whose queries have no latent vector
    aliases=((".self_attn.q_proj.", ".self_attn.q_b_proj."),),
    bare_weights=(".e_score_correction_bias",),
)


def spec_2(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("DeepSeek V2", config, {"scoring_func": "softmax", "norm_topk_prob": False})
    config = {"n_routed_experts": 64, "moe_intermediate_size": 1407, **config}
    method = config.get("topk_method") or "greedy"
    grouped = method == "group_limited_greedy"
    if not grouped:
        refuse_unusual("DeepSeek V2", config, {"topk_method": "greedy"})
    experts = _experts(config, 0)
    if grouped:
        experts = replace(
            experts,
            groups=int(required(config, "n_group")),
            groups_per_token=int(required(config, "topk_group")),
        )
    return _spec("DeepseekV2ForCausalLM", config, experts)


def spec_3(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual(
        "DeepSeek V3",
        config,
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
    )
    config = {
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        **config,
    }
    experts = replace(
        _experts(config, 3),
        scoring="sigmoid",
        corrected=True,
        normalised=config.get("norm_topk_prob") is not False,
        groups=int(config.get("n_group") or 8),
        groups_per_token=int(config.get("topk_group") or 4),
    )
    return _spec("DeepseekV3ForCausalLM", config, experts)


def _spec(architecture: str, config: dict[str, Any], experts: Experts) -> ModelSpec:
    latent = LatentAttention(
        kv_rank=int(config.get("kv_lora_rank") or 512),
        rope_size=int(config.get("qk_rope_head_dim") or 64),
        plain_size=int(config.get("qk_nope_head_dim") or 128),
        value_size=int(config.get("v_head_dim") or 128),
        query_rank=int(config.get("q_lora_rank", 1536) or 0),
    )
    bias = bool(config.get("attention_bias", False))
    config = {
        **config,
        "num_key_value_heads": 1,
        "partial_rotary_factor": latent.rope_size / latent.cached_size,
    }
    found = decoder_spec(
        architecture,
        config,
        default_positions=4096,
        head_size=latent.cached_size,
        latent=latent,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=False,
        experts=experts,
    )
    return replace(found, attention_scale=_scale(latent, found))


def _scale(latent: LatentAttention, spec: ModelSpec) -> float:
    """Return the factor of the scores, which grows with the factor of YaRN."""
    scale = float(latent.query_size**-0.5)
    scaling = spec.rope_scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    grown = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
    return scale * grown * grown


def _experts(config: dict[str, Any], plain_layers: int) -> Experts:
    """plain_layers: the number of leading layers without experts where the config names none"""
    first = config.get("first_k_dense_replace", plain_layers) or 0
    step = config.get("moe_layer_freq") or 1
    layers = tuple(layer >= first and layer % step == 0 for layer in layer_numbers(config))
    size = config["moe_intermediate_size"]
    return Experts(
        config["n_routed_experts"],
        config.get("num_experts_per_tok") or 8,
        size,
        normalised=False,
        shared_ffn_size=size * (config.get("n_shared_experts", 2) or 0),
        shared_router=False,
        layers=None if all(layers) else layers,
        routed_scale=float(config.get("routed_scaling_factor") or 1.0),
        exact_router=True,
    )


FAMILIES = (
    Family("deepseek2", ("DeepseekV2ForCausalLM",), spec_2, WEIGHTS, ("deepseek_v2",)),
    Family("deepseek3", ("DeepseekV3ForCausalLM",), spec_3, WEIGHTS, ("deepseek_v3",)),
)
