"""OPT: learned positions (the first two are reserved for padding), layer norm, biases, ReLU.

The 350M model is post-norm, and its embeddings are smaller than the hidden size.
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, required
from slipstream.model.spec import ModelSpec

_RESERVED_POSITIONS = 2
WEIGHTS = WeightMap(
    layer_prefix="model.decoder.layers.{layer}.",
    layers={
        "input_layernorm": ("self_attn_layer_norm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.out_proj",),
        "post_layernorm": ("final_layer_norm",),
        "mlp.fc": ("fc1",),
        "mlp.proj": ("fc2",),
    },
    outer={
        "transformer.vocab_embedding": "model.decoder.embed_tokens",
        "transformer.position_embedding": "model.decoder.embed_positions",
        "transformer.project_in": "model.decoder.project_in",
        "transformer.project_out": "model.decoder.project_out",
        "transformer.ln_f": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    rows={
        "transformer.position_embedding": lambda spec: range(
            _RESERVED_POSITIONS, spec.max_positions + _RESERVED_POSITIONS
        )
    },
    optional_prefix="model.",
)


def spec(config: dict[str, Any]) -> ModelSpec:
    hidden = required(config, "hidden_size")
    embedding = config.get("word_embed_proj_dim") or hidden
    norms_after = not config.get("do_layer_norm_before", True)
    bias = bool(config.get("enable_bias", True))
    config = {
        "tie_word_embeddings": True,
        **config,
        "intermediate_size": required(config, "ffn_dim"),
        "hidden_act": config.get("activation_function") or "relu",
        "rms_norm_eps": 1e-5,
    }
    return decoder_spec(
        "OPTForCausalLM",
        config,
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        norm_weights=config.get("layer_norm_elementwise_affine") is not False,
        position="learned",
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=bias,
        norms_after=norms_after,
        final_norm=not norms_after and not config.get("_remove_final_layer_norm"),
        embedding_size=embedding if embedding != hidden else 0,
    )


FAMILY = Family("opt", ("OPTForCausalLM",), spec, WEIGHTS, ("opt",))
