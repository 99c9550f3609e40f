"""StarCoder 1 and SantaCoder: GPT-2 with one KV head for all queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.gpt import gpt2
from slipstream.model.families.hf_config import refuse_unusual
from slipstream.model.families.row_order import grouped_heads
from slipstream.model.spec import ModelSpec

WEIGHTS = replace(gpt2.WEIGHTS, transposed=frozenset(), rows={"attention.qkv": grouped_heads})


def spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("StarCoder", config, {"scale_attn_weights": True, "add_cross_attention": False})
    config = {"activation_function": "gelu_pytorch_tanh", **config}
    spec = replace(gpt2.spec(config), architecture="GPTBigCodeForCausalLM")
    return replace(spec, kv_heads=1) if config.get("multi_query", True) else spec


FAMILY = Family("gpt_bigcode", ("GPTBigCodeForCausalLM",), spec, WEIGHTS, ("gpt_bigcode",))
