"""Cohere Command R: parallel attention and MLP behind one layer norm without bias, RoPE on
neighbouring columns, scaled logits. Cohere 2 has a window in most layers, no RoPE in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, layer_numbers, windowed_layers
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.families.row_order import paired_heads, paired_rotation
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_norm",),
        "attention.k_layernorm": ("self_attn.k_norm",),
    },
    rows={
        "attention.qkv": paired_rotation,
        "attention.q_layernorm": lambda spec: paired_heads(spec, spec.heads),
        "attention.k_layernorm": lambda spec: paired_heads(spec, spec.kv_heads),
    },
    flat=frozenset({"attention.q_layernorm", "attention.k_layernorm"}),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    return _cohere_spec(
        "CohereForCausalLM",
        config,
        qk_norm=bool(config.get("use_qk_norm", False)),
        qk_norm_kind="head",
    )


def spec_2(config: dict[str, Any]) -> ModelSpec:
    pattern = config.get("sliding_window_pattern") or 4
    windowed = tuple((layer + 1) % pattern != 0 for layer in layer_numbers(config))
    options = windowed_layers(config, config.get("sliding_window", 4096), windowed)
    slides = options.get("sliding_layers")
    if not options:
        slides = tuple(False for _ in windowed)
    return _cohere_spec("Cohere2ForCausalLM", config, rotated_layers=slides, **options)


def _cohere_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    scale = config.get("logit_scale")
    config = {
        "tie_word_embeddings": True,
        **config,
        "rms_norm_eps": config.get("layer_norm_eps") or 1e-5,
        "rope_theta": config.get("rope_theta") or 500_000.0,
    }
    return decoder_spec(
        architecture,
        config,
        default_positions=8192,
        norm="layer",
        norm_bias=False,
        parallel_residual=True,
        shared_norm=True,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        logit_scale=0.0625 if scale is None else float(scale),
        **options,
    )


FAMILIES = (
    Family("cohere", ("CohereForCausalLM",), spec, WEIGHTS, ("cohere",)),
    Family("cohere2", ("Cohere2ForCausalLM",), spec_2, WEIGHTS, ("cohere2",)),
)
