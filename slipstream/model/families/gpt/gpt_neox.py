"""GPT-NeoX and Pythia: parallel attention and MLP with a norm each, RoPE on a quarter of a head."""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.row_order import grouped_heads
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="gpt_neox.layers.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("attention.query_key_value",),
        "attention.dense": ("attention.dense",),
        "post_layernorm": ("post_attention_layernorm",),
        "mlp.fc": ("mlp.dense_h_to_4h",),
        "mlp.proj": ("mlp.dense_4h_to_h",),
    },
    outer={
        "transformer.vocab_embedding": "gpt_neox.embed_in",
        "transformer.ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    rows={"attention.qkv": grouped_heads},
    # saved as buffers
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias", True))
    renamed = {
        "hidden_act": config.get("hidden_act") or "gelu",
        "rms_norm_eps": config.get("layer_norm_eps") or 1e-5,
        "rope_theta": config.get("rope_theta") or config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("partial_rotary_factor")
        or config.get("rotary_pct")
        or 0.25,
    }
    return decoder_spec(
        "GPTNeoXForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        parallel_residual=bool(config.get("use_parallel_residual", True)),
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=True,
    )


FAMILY = Family("gpt_neox", ("GPTNeoXForCausalLM",), spec, WEIGHTS, ("gpt_neox",))
