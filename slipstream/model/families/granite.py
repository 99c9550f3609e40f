"""Granite 3, and Granite 4 without experts and state-space layers: Llama with factors of the
embeddings, the scores, the residual stream and the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, UnsupportedModel
from slipstream.model.families.hf_config import decoder_spec, layer_numbers, refuse_unusual
from slipstream.model.families.llama import WEIGHTS
from slipstream.model.families.phi3 import FUSED_MLP_ROWS
from slipstream.model.spec import ModelSpec

WEIGHTS_4 = replace(
    WEIGHTS,
    layers={
        **WEIGHTS.layers,
        "mlp.fc": ("shared_mlp.input_linear",),
        "mlp.gate": ("shared_mlp.input_linear",),
        "mlp.proj": ("shared_mlp.output_linear",),
    },
    rows=FUSED_MLP_ROWS,
)


def spec(config: dict[str, Any]) -> ModelSpec:
    return _granite_spec("GraniteForCausalLM", config)


def spec_4(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("Granite 4", config, {"num_local_experts": 0})
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    others = [kind for kind in kinds if kind not in ("attention", "full_attention")]
    if others:
        raise UnsupportedModel(
            f"Granite 4 with layers of the kind {others[0]!r} is not supported; the models with "
            "attention in all layers are"
        )
    layers = layer_numbers(config)
    rotates = config.get("position_embedding_type") == "rope"
    config = {**config, "intermediate_size": config.get("shared_intermediate_size") or 1024}
    return _granite_spec(
        "GraniteMoeHybridForCausalLM",
        config,
        rotated_layers=None if rotates else tuple(False for _ in layers),
    )


def _granite_spec(architecture: str, config: dict[str, Any], **options: Any) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        architecture,
        config,
        default_positions=2048,
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_scale=float(config.get("attention_multiplier") or 1.0),
        embedding_scale=float(config.get("embedding_multiplier") or 1.0),
        residual_scale=float(config.get("residual_multiplier") or 1.0),
        logit_scale=1.0 / float(config.get("logits_scaling") or 1.0),
        **options,
    )


FAMILIES = (
    Family("granite", ("GraniteForCausalLM",), spec, WEIGHTS, ("granite",)),
    Family("granite4", ("GraniteMoeHybridForCausalLM",), spec_4, WEIGHTS_4, ("granitemoehybrid",)),
)
