"""GPT-J: parallel attention and MLP behind one norm, and RoPE on neighbouring columns of the first
part of a head. Its rows are reordered on import, so that RoPE pairs halves as in other families.
"""

from __future__ import annotations

from typing import Any

from slipstream.model.families.family import Family, WeightMap
from slipstream.model.families.hf_config import decoder_spec, required
from slipstream.model.families.row_order import paired_rotation
from slipstream.model.spec import ModelSpec

WEIGHTS = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("ln_1",),
        "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.dense": ("attn.out_proj",),
        "mlp.fc": ("mlp.fc_in",),
        "mlp.proj": ("mlp.fc_out",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    rows={"attention.qkv": paired_rotation},
    # tables, saved as buffers
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    hidden = required(config, "n_embd")
    heads = required(config, "n_head")
    rotated = config.get("rotary_dim") or hidden // heads
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": required(config, "n_layer"),
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_position_embeddings": config.get("n_positions"),
        "hidden_act": config.get("activation_function") or "gelu_new",
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
        "partial_rotary_factor": rotated / (hidden // heads),
    }
    return decoder_spec(
        "GPTJForCausalLM",
        {**config, **renamed},
        default_positions=2048,
        gated_mlp=False,
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        mlp_bias=True,
        head_bias=True,
    )


FAMILY = Family("gptj", ("GPTJForCausalLM",), spec, WEIGHTS, ("gptj",))
