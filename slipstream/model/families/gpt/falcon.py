"""Falcon 7B, 11B, 40B and 180B: parallel attention and MLP, few KV heads or one. Falcon-RW:
position biases (ALiBi) in place of RoPE.
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual, required
from slipstream.model.families.row_order import grouped_heads
from slipstream.model.spec import Alibi, ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.dense": ("self_attention.dense",),
        "post_layernorm": ("post_attention_layernorm",),
        "mlp.fc": ("mlp.dense_h_to_4h",),
        "mlp.proj": ("mlp.dense_4h_to_h",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.word_embeddings",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    rows={"attention.qkv": grouped_heads},
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    # names of the larger models
    aliases=((".ln_attn.", ".input_layernorm."), (".ln_mlp.", ".post_attention_layernorm.")),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    heads = required(config, "num_attention_heads")
    new = bool(config.get("new_decoder_architecture", False))
    parallel = bool(config.get("parallel_attn", True))
    if new:
        refuse_unusual("Falcon of the new decoder architecture", config, {"parallel_attn": True})
    multi_query = bool(config.get("multi_query", True)) and not new
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    bias = bool(config.get("bias", False))
    positions: dict[str, Any] = {}
    if config.get("alibi"):
        head_size = required(config, "hidden_size") // heads
        # the biases are rounded and scaled as the scores are: the models were trained so
        positions = {"position": "alibi", "alibi": Alibi(scale=head_size**-0.5, rounded=True)}
    renamed = {
        "num_key_value_heads": 1 if multi_query else config.get("num_kv_heads") or heads,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * required(config, "hidden_size"),
        "hidden_act": config.get("activation") or "gelu",
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return decoder_spec(
        "FalconForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=bias,
        **positions,
    )


FAMILY = Family("falcon", ("FalconForCausalLM",), spec, WEIGHTS, ("falcon",))
