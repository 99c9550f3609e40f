"""InternLM 2: Llama with fused q, k and v, and other names. InternLM 3: Llama with biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec
from slipstream.model.families.llama import WEIGHTS as WEIGHTS_3
from slipstream.model.families.row_order import grouped_heads
from slipstream.model.spec import ModelSpec

WEIGHTS_2 = WeightMap(
    layer_prefix="model.layers.{layer}.",
    layers={
        "input_layernorm": ("attention_norm",),
        "attention.qkv": ("attention.wqkv",),
        "attention.dense": ("attention.wo",),
        "post_layernorm": ("ffn_norm",),
        "mlp.fc": ("feed_forward.w1",),
        "mlp.gate": ("feed_forward.w3",),
        "mlp.proj": ("feed_forward.w2",),
    },
    outer={
        "transformer.vocab_embedding": "model.tok_embeddings",
        "transformer.ln_f": "model.norm",
        "lm_head": "output",
    },
    rows={"attention.qkv": grouped_heads},
    ignored=(r".*\.rotary_emb\.inv_freq",),
)


def spec_2(config: dict[str, Any]) -> ModelSpec:
    bias = bool(config.get("bias", False))
    return decoder_spec(
        "InternLM2ForCausalLM", config, default_positions=2048, qkv_bias=bias, o_proj_bias=bias
    )


def spec_3(config: dict[str, Any]) -> ModelSpec:
    # transformers' own class calls the two options attention_bias and mlp_bias
    bias = bool(config.get("bias", config.get("mlp_bias", False)))
    spec = decoder_spec(
        "InternLM3ForCausalLM",
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, **config},
        default_positions=32768,
        qkv_bias=bool(config.get("qkv_bias", config.get("attention_bias", False))),
    )
    return replace(spec, o_proj_bias=bias, mlp_bias=bias)


FAMILIES = (
    Family("internlm2", ("InternLM2ForCausalLM",), spec_2, WEIGHTS_2, ("internlm2",)),
    Family("internlm3", ("InternLM3ForCausalLM",), spec_3, WEIGHTS_3, ("internlm3",)),
)
