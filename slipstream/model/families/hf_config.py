"""Read what the Hugging Face configs of all families share: sizes, activations and RoPE, in every
generation of their spelling.
"""

from __future__ import annotations

import math
from typing import Any

from slipstream.model.families.family import UnsupportedModel
from slipstream.model.spec import MAX_LAYERS, ModelSpec, RopeKind, RopeScaling

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
_ROPE_KINDS: dict[str, RopeKind] = {
    "su": "longrope",
    "longrope": "longrope",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
}


def required(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UnsupportedModel(f"the model's config.json has no {key!r}")
    return config[key]


def layer_numbers(config: dict[str, Any]) -> range:
    """Return the layers' indices; a damaged count is an error, not an endless list."""
    count = required(config, "num_hidden_layers")
    if not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
        raise UnsupportedModel(f"num_hidden_layers is {count!r}, and must be 1 to {MAX_LAYERS}")
    return range(count)


def refuse_unusual(name: str, config: dict[str, Any], usual: dict[str, Any]) -> None:
    """Refuse options that change the mathematics; an absent option or null has its usual value."""
    for option, value in usual.items():
        if config.get(option) not in (None, value):
            raise UnsupportedModel(
                f"{name} with {option}={config[option]} is not supported; {value} is"
            )


def activation(name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def decoder_spec(
    architecture: str, config: dict[str, Any], *, default_positions: int, **options: Any
) -> ModelSpec:
    """Return the spec of a decoder with RoPE, RMS norm and gated MLP.

    options: values of `ModelSpec` that the family sets
    """
    heads = required(config, "num_attention_heads")
    hidden = required(config, "hidden_size")
    positions = config.get("max_position_embeddings") or default_positions
    rope = _rope_dictionary(config)
    scaling = _rope_scaling(rope, config, positions)
    options.setdefault("head_size", config.get("head_dim") or hidden // heads)
    return ModelSpec(
        architecture=architecture,
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden,
        layers=required(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn_size=required(config, "intermediate_size"),
        max_positions=_stretched_positions(positions, scaling),
        activation=activation(config.get("hidden_act") or "silu"),
        norm_epsilon=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        rotary_fraction=float(
            rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        ),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        **options,
    )


def sliding_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers` of a Qwen config: by `layer_types` if given,
    otherwise the layers from `max_window_layers` on.
    """
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return windowed_layers(config, window, tuple(layer >= first for layer in layer_numbers(config)))


def windowed_layers(
    config: dict[str, Any], window: int | None, otherwise: tuple[bool, ...]
) -> dict[str, Any]:
    """Return the same from `layer_types`, or from `otherwise`: the layers with a window."""
    kinds = config.get("layer_types")
    known = ("sliding_attention", "full_attention")
    unknown = [kind for kind in kinds or () if kind not in known]
    if unknown:
        raise UnsupportedModel(
            f"layer_types with {unknown[0]!r} is not supported; {' and '.join(known)} are"
        )
    slides = otherwise if kinds is None else tuple(kind == "sliding_attention" for kind in kinds)
    if window is None or not any(slides):
        return {}
    return {"sliding_window": int(window), "sliding_layers": None if all(slides) else slides}


def rotated_layers(config: dict[str, Any]) -> tuple[bool, ...]:
    """Return the layers with RoPE: by `no_rope_layers`, in which 1 means that a layer has it, or
    all but every `no_rope_layer_interval`-th one.
    """
    layers = layer_numbers(config)
    named = config.get("no_rope_layers")
    if named:
        if len(named) < len(layers):
            raise UnsupportedModel(f"no_rope_layers names {len(named)} of {len(layers)} layers")
        return tuple(bool(named[layer]) for layer in layers)
    interval = config.get("no_rope_layer_interval") or 4
    return tuple((layer + 1) % interval != 0 for layer in layers)


def rope_by_window(
    name: str, config: dict[str, Any], theta: float, sliding_theta: float
) -> tuple[dict[str, Any], float]:
    """Return the rotary parameters of layers without a window, and the base of those with one.

    theta, sliding_theta: the bases where a config names none
    """
    given = config.get("rope_parameters") or {}
    full = given.get("full_attention")
    sliding = given.get("sliding_attention") or {}
    if sliding.get("rope_type", "default") != "default":
        raise UnsupportedModel(
            f"{name} with rope_type={sliding['rope_type']} of sliding_attention is not supported"
        )
    if full is None:  # older configs have one place for both
        full = {"rope_theta": theta, **(config.get("rope_scaling") or {})}
    return full, float(sliding.get("rope_theta") or sliding_theta)


def _rope_dictionary(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel("rotary positions that differ between layers are not supported")
    return rope


def _rope_scaling(
    rope: dict[str, Any], config: dict[str, Any], positions: int
) -> RopeScaling | None:
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name in ("default", "dynamic"):
        # Dynamic scaling begins beyond the trained length. There it changes the keys of the whole
        # sequence with each token, which cached keys cannot follow: the model is served up to it.
        return None
    if name not in _ROPE_KINDS:
        known = ", ".join(("default", "dynamic", *_ROPE_KINDS))
        raise UnsupportedModel(f"rope type {name!r} is not supported; supported: {known}")
    kind = _ROPE_KINDS[name]
    original = _original_positions(kind, rope, config) or positions
    factor = rope.get("factor") or positions / original
    return RopeScaling(
        kind=kind,
        factor=float(factor),
        original_positions=int(original),
        low_frequency_factor=float(rope.get("low_freq_factor") or 1.0),
        high_frequency_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, rope, float(factor), int(original)),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
        short_factors=tuple(float(value) for value in rope.get("short_factor") or ()),
        long_factors=tuple(float(value) for value in rope.get("long_factor") or ()),
    )


def _original_positions(kind: RopeKind, rope: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Return the trained length. linear stretches max_position_embeddings instead."""
    if kind == "linear":
        return None
    key = "original_max_position_embeddings"
    return config.get(key) or rope.get(key)


def _attention_factor(
    kind: str, rope: dict[str, Any], factor: float, original: int
) -> float | None:
    """Return the factor of cos and sin. longrope computes it from the config's factor, or from the
    ratio of the two lengths.
    """
    given: float | None = rope.get("attention_factor")
    if kind != "longrope" or given is not None:
        return given
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def _stretched_positions(positions: int, scaling: RopeScaling | None) -> int:
    """Return the context that the model serves: configs with linear or yarn scaling often
    give the trained one.
    """
    if scaling is None or scaling.kind in ("llama3", "longrope"):
        return int(positions)
    return max(int(positions), int(scaling.original_positions * scaling.factor))
