"""Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP behind one norm, RoPE on a part of a head,
biases everywhere.
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="model.layers.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_layernorm": ("self_attn.q_layernorm",),
        "attention.k_layernorm": ("self_attn.k_layernorm",),
        "attention.dense": ("self_attn.dense",),
        "mlp.fc": ("mlp.fc1",),
        "mlp.proj": ("mlp.fc2",),
    },
    outer={
        "transformer.vocab_embedding": "model.embed_tokens",
        "transformer.ln_f": "model.final_layernorm",
        "lm_head": "lm_head",
    },
    ignored=(r".*\.rotary_emb\.inv_freq",),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    qk_norm = bool(config.get("qk_layernorm", False))
    renamed = {
        "hidden_act": config.get("hidden_act") or "gelu_new",
        "rms_norm_eps": config.get("layer_norm_eps") or 1e-5,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 0.5,
    }
    return decoder_spec(
        "PhiForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm=qk_norm,
        qk_norm_bias=qk_norm,
    )


FAMILY = Family("phi", ("PhiForCausalLM",), spec, WEIGHTS, ("phi", "phi-msft"))
