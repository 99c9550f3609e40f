"""Ministral: Mistral with a window in some layers. Ministral 3: queries are scaled up beyond the
trained length. Of a Mistral 3 vision model the language model is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, UnsupportedModel
from slipstream.model.families.hf_config import decoder_spec, layer_numbers, windowed_layers
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.families.mistral import mistral
from slipstream.model.spec import ModelSpec, QueryScaling

VISION_WEIGHTS = replace(
    WEIGHTS,
    ignored=(*WEIGHTS.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    aliases=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    config = {"num_key_value_heads": 8, **config}
    window = config.get("sliding_window", 4096)
    return decoder_spec(
        "MinistralForCausalLM",
        config,
        default_positions=131072,
        **windowed_layers(config, window, tuple(True for _ in layer_numbers(config))),
    )


def spec_3(config: dict[str, Any]) -> ModelSpec:
    rope: dict[str, Any] = (
        config.get("rope_parameters") or config.get("rope_scaling") or _DEFAULT_ROPE
    )
    config = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        **config,
        "rope_parameters": rope,
        "rope_scaling": None,
    }
    beta = rope.get("llama_4_scaling_beta")
    interval = rope.get("original_max_position_embeddings")
    spec = decoder_spec(
        "Ministral3ForCausalLM",
        config,
        default_positions=262144,
        sliding_window=config.get("sliding_window"),
        query_scaling=QueryScaling(float(beta), int(interval)) if beta and interval else None,
    )
    return replace(spec, max_positions=int(config["max_position_embeddings"]))


def vision_spec(config: dict[str, Any]) -> ModelSpec:
    text = config.get("text_config") or {}
    kinds = {"mistral": mistral.spec, "ministral": spec, "ministral3": spec_3}
    kind = text.get("model_type", "mistral")
    if kind not in kinds:
        raise UnsupportedModel(
            f"Mistral 3 with a language model of the type {kind!r} is not supported; "
            f"{', '.join(kinds)} are"
        )
    tied = config.get("tie_word_embeddings", False)
    return kinds[kind]({"tie_word_embeddings": tied, **text})


FAMILIES = (
    Family("ministral", ("MinistralForCausalLM",), spec, WEIGHTS, ("ministral",)),
    Family("ministral3", ("Ministral3ForCausalLM",), spec_3, WEIGHTS, ("ministral3",)),
    Family(
        "mistral3",
        ("Mistral3ForConditionalGeneration",),
        vision_spec,
        VISION_WEIGHTS,
        ("mistral3",),
    ),
)
