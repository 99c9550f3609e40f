"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional window in some layers."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, sliding_options
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    sliding = sliding_options(config)
    return decoder_spec(
        "Qwen2ForCausalLM", config, default_positions=32768, qkv_bias=True, **sliding
    )


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), spec, WEIGHTS, ("qwen2",))
