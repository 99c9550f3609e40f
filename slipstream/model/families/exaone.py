"""EXAONE 3: Llama with other names. EXAONE 4: norms behind attention and MLP in place of those
before, q and k normalised, and with a window RoPE in the layers that have it only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, UnsupportedModel, WeightMap
from slipstream.model.families.hf_config import (
    decoder_spec,
    layer_numbers,
    required,
    windowed_layers,
)
from slipstream.model.families.llama import WEIGHTS as LLAMA_WEIGHTS
from slipstream.model.spec import ModelSpec

WEIGHTS_3 = WeightMap(
    layer_prefix="transformer.h.{layer}.",
    layers={
        "input_layernorm": ("ln_1",),
        "attention.qkv": (
            "attn.attention.q_proj",
            "attn.attention.k_proj",
            "attn.attention.v_proj",
        ),
        "attention.dense": ("attn.attention.out_proj",),
        "post_layernorm": ("ln_2",),
        "mlp.fc": ("mlp.c_fc_0",),
        "mlp.gate": ("mlp.c_fc_1",),
        "mlp.proj": ("mlp.c_proj",),
    },
    outer={
        "transformer.vocab_embedding": "transformer.wte",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    ignored=(r".*\.rotary\.inv_freq",),
)
WEIGHTS_4 = replace(
    LLAMA_WEIGHTS,
    layers={
        **LLAMA_WEIGHTS.layers,
        "attention.q_layernorm": ("self_attn.q_norm",),
        "attention.k_layernorm": ("self_attn.k_norm",),
        "post_feedforward_layernorm": ("post_feedforward_layernorm",),
    },
)


def spec_3(config: dict[str, Any]) -> ModelSpec:
    renamed = {
        "num_hidden_layers": config.get("num_layers") or required(config, "num_hidden_layers"),
        "hidden_act": config.get("activation_function"),
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
    }
    return decoder_spec("ExaoneForCausalLM", {**config, **renamed}, default_positions=2048)


def spec_4(config: dict[str, Any]) -> ModelSpec:
    window = config.get("sliding_window", 4096)
    windowed = _windowed(config, config.get("sliding_window_pattern", 4)) if window else ()
    options = windowed_layers(config, window, windowed)
    return decoder_spec(
        "Exaone4ForCausalLM",
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, **config},
        default_positions=2048,
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        rotated_layers=options.get("sliding_layers"),
        **options,
    )


def _windowed(config: dict[str, Any], pattern: Any) -> tuple[bool, ...]:
    """Return the layers with a window. pattern: a number, every n-th layer has none; or a text such
    as LLLG, whose L are layers with a window. The last layer has none then.
    """
    layers = layer_numbers(config)
    if isinstance(pattern, str) and pattern:
        last = layers[-1]
        return tuple(pattern[layer % len(pattern)] == "L" and layer != last for layer in layers)
    if not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedModel(f"sliding_window_pattern={pattern!r} is not supported")
    return tuple((layer + 1) % pattern != 0 for layer in layers)


FAMILIES = (
    Family("exaone", ("ExaoneForCausalLM",), spec_3, WEIGHTS_3, ("exaone",)),
    Family("exaone4", ("Exaone4ForCausalLM",), spec_4, WEIGHTS_4, ("exaone4",)),
)
