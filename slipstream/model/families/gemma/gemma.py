"""Gemma: Llama with norm weights stored minus 1, a scaled embedding tied to the head, and GELU
(tanh form).
"""

from __future__ import annotations

import math
from typing import Any

from slipstream.model.families.family import Family
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.spec import ModelSpec


def gemma_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    """Return the spec of a Gemma; options: values of `ModelSpec` that its generation sets"""
    refuse_unusual(architecture, config, {"use_bidirectional_attention": False})
    attention_bias = bool(config.get("attention_bias", False))
    options.setdefault("default_positions", 8192)
    # hidden_act "gelu" in old configs means the tanh form
    config = {
        "tie_word_embeddings": True,
        "head_dim": 256,
        **config,
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
    }
    return decoder_spec(
        architecture,
        config,
        norm_offset=1.0,
        embedding_scale=math.sqrt(required(config, "hidden_size")),
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        **options,
    )


def spec(config: dict[str, Any]) -> ModelSpec:
    return gemma_spec("GemmaForCausalLM", config)


FAMILY = Family("gemma", ("GemmaForCausalLM",), spec, WEIGHTS, ("gemma",))
