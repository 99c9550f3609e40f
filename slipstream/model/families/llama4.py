"""Llama 4, text only: experts behind a sigmoid router and one for every token; attention in chunks,
and in every fourth layer over everything, without RoPE. Of a vision model the language model is
served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, UnsupportedModel
from slipstream.model.families.hf_config import (
    decoder_spec,
    layer_numbers,
    required,
    rotated_layers,
)
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.families.row_order import paired_rotation
from slipstream.model.spec import Experts, ModelSpec, QueryScaling

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "mlp.fc": ("feed_forward.gate_proj",),
        "mlp.gate": ("feed_forward.up_proj",),
        "mlp.proj": ("feed_forward.down_proj",),
        "mlp.router": ("feed_forward.router",),
        "mlp.experts.gate_up": ("feed_forward.experts.gate_up_proj",),
        "mlp.experts.proj": ("feed_forward.experts.down_proj",),
        "mlp.shared.gate_up": (
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
        ),
        "mlp.shared.proj": ("feed_forward.shared_expert.down_proj",),
    },
    transposed=frozenset({"mlp.experts.gate_up", "mlp.experts.proj"}),
    rows={"attention.qkv": paired_rotation},
    ignored=(*LLAMA_WEIGHTS.ignored, r"(model\.)?(vision_model|multi_modal_projector)\..*"),
    aliases=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    bare_weights=(".experts.gate_up_proj", ".experts.down_proj"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    # the config names the size of an expert first, and that of a plain MLP apart
    ffn_size = required(config, "intermediate_size")
    config = {
        "rope_theta": 500_000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        **config,
        "intermediate_size": config.get("intermediate_size_mlp") or 16384,
    }
    rotated = rotated_layers(config)
    _check_kinds(config, rotated)
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        "Llama4ForCausalLM",
        config,
        default_positions=131072,
        qkv_bias=bias,
        o_proj_bias=bias,
        rotated_layers=None if all(rotated) else rotated,
        attention_chunk=config.get("attention_chunk_size", 8192),
        qk_norm=bool(config.get("use_qk_norm", True)),
        qk_norm_kind="plain",
        query_scaling=_query_scaling(config),
        experts=_experts(config, ffn_size),
    )


def vision_spec(config: dict[str, Any]) -> ModelSpec:
    return spec(required(config, "text_config"))


def _check_kinds(config: dict[str, Any], rotated: tuple[bool, ...]) -> None:
    """Refuse layers with RoPE but without chunks, and the opposite."""
    kinds = config.get("layer_types")
    usual = ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    if kinds is not None and list(kinds) != usual:
        raise UnsupportedModel(
            "Llama 4 is supported with attention in chunks in the layers that have RoPE; "
            "layer_types and no_rope_layers say something else"
        )


def _query_scaling(config: dict[str, Any]) -> QueryScaling | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    beta = float(config.get("attn_scale") or 0.1)
    return QueryScaling(beta, int(config.get("floor_scale") or 8192), 1, unrotated_only=True)


def _experts(config: dict[str, Any], ffn_size: int) -> Experts:
    return Experts(
        config.get("num_local_experts") or 16,
        config.get("num_experts_per_tok") or 1,
        ffn_size,
        shared_ffn_size=ffn_size,
        shared_router=False,
        scoring="sigmoid",
        weighted_inputs=True,
        layers=_expert_layers(config),
    )


def _expert_layers(config: dict[str, Any]) -> tuple[bool, ...] | None:
    """Return the layers that have experts; None: all layers."""
    step = config.get("interleave_moe_layer_step") or 1
    named = config.get("moe_layers")
    layers = layer_numbers(config)
    if named is None:
        found = tuple((layer + 1) % step == 0 for layer in layers)
    else:
        found = tuple(layer in named for layer in layers)
    return None if all(found) else found


FAMILIES = (
    Family("llama4", ("Llama4ForCausalLM",), spec, WEIGHTS, ("llama4_text",)),
    Family("llama4_vision", ("Llama4ForConditionalGeneration",), vision_spec, WEIGHTS, ("llama4",)),
)
