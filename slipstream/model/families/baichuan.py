"""Baichuan 1 and 2: Llama with fused q, k and v. The 13B models have position biases (ALiBi) in
place of RoPE. The output layer of Baichuan 2 has rows of length 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import Alibi, ModelSpec

_VOCABULARY_OF_2 = 125696  # the configs of both generations are the same otherwise
_HIDDEN_SIZE_OF_13B = 5120
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={**LLAMA_WEIGHTS.layers, "attention.qkv": ("self_attn.W_pack",)},
    unit_rows={"lm_head": lambda spec: spec.vocab_size == _VOCABULARY_OF_2},
)


def spec(config: dict[str, Any]) -> ModelSpec:
    options: dict[str, Any] = {}
    if _has_position_biases(config):
        options = {"position": "alibi", "alibi": Alibi()}
    positions = config.get("max_position_embeddings") or config.get("model_max_length")
    return decoder_spec(
        "BaichuanForCausalLM",
        {**config, "max_position_embeddings": positions},
        default_positions=4096,
        **options,
    )


def _has_position_biases(config: dict[str, Any]) -> bool:
    """Return whether a config is one of the 13B models, which name no number of positions."""
    if "BaiChuanForCausalLM" in (config.get("architectures") or ()):
        return False
    no_positions = config.get("max_position_embeddings") is None
    return no_positions or config.get("hidden_size") == _HIDDEN_SIZE_OF_13B


FAMILY = Family(
    "baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), spec, WEIGHTS, ("baichuan",)
)
