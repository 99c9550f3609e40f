"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and fused gate and up projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, RowOrder
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

# the rows of gate and up projection in one tensor
FUSED_MLP_ROWS: dict[str, RowOrder] = {
    "mlp.fc": lambda spec: range(spec.ffn_size),
    "mlp.gate": lambda spec: range(spec.ffn_size, 2 * spec.ffn_size),
}
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "attention.qkv": ("self_attn.qkv_proj",),
        "mlp.fc": ("mlp.gate_up_proj",),
        "mlp.gate": ("mlp.gate_up_proj",),
    },
    rows=FUSED_MLP_ROWS,
)


def spec(config: dict[str, Any]) -> ModelSpec:
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(place) or {})
    if "yarn" in (rope.get("type"), rope.get("rope_type")):  # an early name of longrope
        rope["rope_type"] = "longrope"
    config = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **config, place: rope}
    return decoder_spec(
        "Phi3ForCausalLM",
        config,
        default_positions=4096,
        sliding_window=config.get("sliding_window"),
    )


FAMILY = Family("phi3", ("Phi3ForCausalLM",), spec, WEIGHTS, ("phi3",))
