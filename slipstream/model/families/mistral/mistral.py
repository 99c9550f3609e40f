"""Mistral: Llama with a sliding window over every layer."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    # absent means the class's default of 4096, null means no window (Mistral 7B v0.2 and later)
    window = config.get("sliding_window", 4096)
    config = {**config, "num_key_value_heads": config.get("num_key_value_heads", 8)}
    return decoder_spec(
        "MistralForCausalLM", config, default_positions=131072, sliding_window=window
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), spec, WEIGHTS, ("mistral",))
