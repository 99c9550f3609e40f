"""StarCoder 2: layer norms, biases, and an MLP without a gate; otherwise Llama with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={**LLAMA_WEIGHTS.layers, "mlp.fc": ("mlp.c_fc",), "mlp.proj": ("mlp.c_proj",)},
)


def spec(config: dict[str, Any]) -> ModelSpec:
    bias = bool(config.get("use_bias", True))
    renamed = {
        "hidden_act": config.get("hidden_act") or "gelu_pytorch_tanh",
        "rms_norm_eps": config.get("norm_epsilon") or 1e-5,
        "num_key_value_heads": config.get("num_key_value_heads") or 2,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return decoder_spec(
        "Starcoder2ForCausalLM",
        {**config, **renamed},
        default_positions=4096,
        gated_mlp=False,
        norm="layer",
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=bias,
        sliding_window=config.get("sliding_window"),
    )


FAMILY = Family("starcoder2", ("Starcoder2ForCausalLM",), spec, WEIGHTS, ("starcoder2",))
