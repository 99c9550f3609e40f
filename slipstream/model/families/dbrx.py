"""DBRX: a mixture of 16 experts, four per token; layer norms without bias; bounded q, k and v."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.families.row_order import expert_halves
from slipstream.model.spec import Experts, ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.blocks.{layer}.",
    layers={
        "input_layernorm": ("norm_attn_norm.norm_1",),
        "attention.qkv": ("norm_attn_norm.attn.Wqkv",),
        "attention.dense": ("norm_attn_norm.attn.out_proj",),
        "post_layernorm": ("norm_attn_norm.norm_2",),
        "mlp.router": ("ffn.router.layer",),
        "mlp.experts.gate_up": ("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
        "mlp.experts.proj": ("ffn.experts.mlp.w2",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.ln_f": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    transposed=frozenset({"mlp.experts.proj"}),
    rows={"mlp.experts.gate_up": expert_halves},
    bare_weights=(".mlp.w1", ".mlp.v1", ".mlp.w2"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    attention = config.get("attn_config") or {}
    experts = config.get("ffn_config") or {}
    norm = experts.get("moe_normalize_expert_weights", 1.0)
    refuse_unusual("DBRX", {"moe_normalize_expert_weights": norm}, _NORMALISATION)
    renamed = {
        "hidden_size": required(config, "d_model"),
        "num_attention_heads": required(config, "n_heads"),
        "num_hidden_layers": required(config, "n_layers"),
        "num_key_value_heads": attention.get("kv_n_heads") or 1,
        "intermediate_size": experts.get("ffn_hidden_size") or 3584,
        "max_position_embeddings": config.get("max_seq_len"),
        "hidden_act": (experts.get("ffn_act_fn") or {}).get("name", "silu"),
        "rms_norm_eps": 1e-5,
        "rope_theta": attention.get("rope_theta") or config.get("rope_theta"),
    }
    return decoder_spec(
        "DbrxForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        norm="layer",
        norm_bias=False,
        qkv_clip=float(attention.get("clip_qkv") or 0.0),
        experts=Experts(
            experts.get("moe_num_experts") or 4,
            experts.get("moe_top_k") or 1,
            renamed["intermediate_size"],
            normalised=norm is not None,
        ),
    )


_NORMALISATION = {"moe_normalize_expert_weights": 1.0}
FAMILY = Family("dbrx", ("DbrxForCausalLM", "DBRXForCausalLM"), spec, WEIGHTS, ("dbrx",))
