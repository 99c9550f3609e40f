from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.model.families.family import UnsupportedModel
from slipstream.model.families.registry import FAMILIES, find_family
from slipstream.model.spec import ModelSpec, RopeScaling
from slipstream.weights.parameters import checkpoint_shapes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return find_family(config).spec(config)


def test_llama_defaults_are_those_of_the_class() -> None:
    spec = spec_of(LLAMA)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=64, layers=3, heads=4, kv_heads=4, head_size=16,
        ffn_size=160, max_positions=512, norm_epsilon=1e-6, rope_theta=10000.0)


def test_llama_options_are_read() -> None:
    spec = spec_of({**LLAMA, "head_dim": 24, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
                    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000, "hidden_act": "gelu"})
    assert (spec.head_size, spec.kv_heads, spec.rope_theta, spec.norm_epsilon) == (24, 2, 500000.0, 1e-5)
    assert (spec.qkv_bias, spec.dense_bias, spec.mlp_bias, spec.tied_embeddings) == (True, True, True, True)
    assert spec.activation == "gelu"


def test_rope_theta_in_rope_parameters_wins_over_the_top_level() -> None:
    spec = spec_of({**LLAMA, "rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}})
    assert spec.rope_theta == 250000.0
    assert spec.rope_scaling is None


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_scaling_in_both_spellings_and_places(type_key: str, place: str) -> None:
    spec = spec_of({**LLAMA, place: {type_key: "linear", "factor": 4.0}})
    assert spec.rope_scaling == RopeScaling("linear", 4.0, 512)
    assert spec.max_positions == 2048


def test_dynamic_stretches_the_configs_own_length() -> None:
    spec = spec_of({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert spec.rope_scaling == RopeScaling("dynamic", 2.0, 512)
    assert spec.max_positions == 1024


def test_llama3_scaling() -> None:
    spec = spec_of({**LLAMA, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
        "original_max_position_embeddings": 64}})
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 64, low_frequency_factor=1.5, high_frequency_factor=5.0)
    assert spec.max_positions == 512


def test_yarn_with_the_trained_length_in_the_config_serves_the_stretched_one() -> None:
    spec = spec_of({**LLAMA, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16, "mscale": 0.7,
        "mscale_all_dim": 0.9, "truncate": False}})
    assert spec.rope_scaling == RopeScaling(
        "yarn", 4.0, 512, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.9, truncate=False)
    assert spec.max_positions == 2048


def test_longrope_takes_its_factor_from_the_two_lengths() -> None:
    spec = spec_of({**LLAMA, "original_max_position_embeddings": 128, "rope_scaling": {
        "type": "su", "short_factor": [1, 2], "long_factor": [3, 4]}})
    scaling = spec.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("longrope", 4.0, 128)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0, 2.0), (3.0, 4.0))
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


def test_unknown_rope_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'mrope'.*linear"):
        spec_of({**LLAMA, "rope_scaling": {"type": "mrope"}})


@pytest.mark.parametrize(("given", "window"), [({}, 4096), ({"sliding_window": None}, None),
                                               ({"sliding_window": 32}, 32)])
def test_mistral_window(given: dict[str, Any], window: int | None) -> None:
    spec = spec_of({**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, **given})
    assert (spec.sliding_window, spec.sliding_layers) == (window, None)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(("given", "window", "layers"), [
    ({"sliding_window": 32}, None, None),
    ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, None, None),
    ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, 32, (False, True, True)),
    ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, 32, None),
    ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0,
      "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, 32, (True, False, False)),
])
def test_qwen_sliding_layers(architecture: str, given: dict[str, Any], window: int | None, layers: Any) -> None:
    spec = spec_of({**LLAMA, "architectures": [architecture], **given})
    assert (spec.sliding_window, spec.sliding_layers) == (window, layers)


def test_qwen_families_differ_in_biases_norms_and_head_size() -> None:
    two = spec_of({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    three = spec_of({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (two.qkv_bias, two.dense_bias, two.qk_norm, two.head_size) == (True, False, False, 16)
    assert (three.qkv_bias, three.dense_bias, three.qk_norm, three.head_size) == (False, False, True, 128)


def test_gpt2() -> None:
    spec = spec_of({"model_type": "gpt2", "vocab_size": 100, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_ctx": 64})
    assert spec == ModelSpec(
        architecture="GPT2LMHeadModel", vocab_size=100, hidden_size=48, layers=2, heads=3, kv_heads=3, head_size=16,
        ffn_size=192, max_positions=64, activation="gelu_tanh", gated_mlp=False, norm="layer", norm_epsilon=1e-5,
        position="learned", qkv_bias=True, dense_bias=True, mlp_bias=True, tied_embeddings=True)


def test_gpt2_option_that_changes_the_mathematics_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="scale_attn_by_inverse_layer_idx"):
        spec_of({"model_type": "gpt2", "vocab_size": 100, "n_embd": 48, "n_layer": 2, "n_head": 3,
                 "scale_attn_by_inverse_layer_idx": True})


def test_unsupported_architecture_lists_the_supported_and_the_strange_tensors() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.3.w1.weight",
             "model.layers.1.mlp.experts.7.w1.weight", "model.layers.1.mlp.router.weight"]
    with pytest.raises(UnsupportedModel) as refusal:
        find_family({"architectures": ["MixtralForCausalLM"]}, names)
    text = str(refusal.value)
    for family in FAMILIES:
        assert family.architectures[0] in text
    assert text.startswith("architecture MixtralForCausalLM is not supported")
    assert text.endswith(": model.layers.N.mlp.experts.N.w1.weight, model.layers.N.mlp.router.weight")


def test_a_missing_size_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="'intermediate_size'"):
        spec_of({key: value for key, value in LLAMA.items() if key != "intermediate_size"})


def test_every_parameter_of_a_spec_has_a_recipe_in_its_family() -> None:
    for family in FAMILIES:
        config = {**LLAMA, "n_embd": 64, "n_layer": 3, "n_head": 4, "attention_bias": True, "mlp_bias": True,
                  "num_key_value_heads": 2}
        recipes = [family.weights.recipe(name) for name in checkpoint_shapes(family.spec(config))]
        sources = [source for recipe in recipes for source in recipe.sources]
        assert len(set(sources)) == len(sources)
        assert all(family.weights.knows(source) for source in sources)
