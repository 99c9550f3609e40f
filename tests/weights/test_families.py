from __future__ import annotations

import json
import math
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from slipstream.model.families.family import Family, UnsupportedModel
from slipstream.model.families.registry import FAMILIES, find_family
from slipstream.model.families.row_order import grouped_heads, paired_rotation
from slipstream.model.spec import Experts, ModelSpec, RopeScaling
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


def read_spec(config: dict[str, Any]) -> ModelSpec:
    return find_family(config).spec(config)


def test_llama_defaults() -> None:
    spec = read_spec(LLAMA)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        layers=3,
        heads=4,
        kv_heads=4,
        head_size=16,
        ffn_size=160,
        max_positions=512,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
    )


def test_llama_options_are_read() -> None:
    spec = read_spec(
        {
            **LLAMA,
            "head_dim": 24,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000,
            "hidden_act": "gelu",
        }
    )
    assert (spec.head_size, spec.kv_heads, spec.rope_theta, spec.norm_epsilon) == (
        24,
        2,
        500000.0,
        1e-5,
    )
    assert (spec.qkv_bias, spec.o_proj_bias, spec.mlp_bias, spec.tied_embeddings) == (
        True,
        True,
        True,
        True,
    )
    assert spec.activation == "gelu"


def test_rope_theta_in_rope_parameters_overrides_the_top_level() -> None:
    spec = read_spec(
        {
            **LLAMA,
            "rope_theta": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        }
    )
    assert spec.rope_theta == 250000.0
    assert spec.rope_scaling is None


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_under_both_keys_and_in_both_places(type_key: str, place: str) -> None:
    spec = read_spec({**LLAMA, place: {type_key: "linear", "factor": 4.0}})
    assert spec.rope_scaling == RopeScaling("linear", 4.0, 512)
    assert spec.max_positions == 2048


def test_dynamic_scaling_is_served_up_to_the_trained_length() -> None:
    spec = read_spec({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert spec.rope_scaling is None
    assert spec.max_positions == 512


def test_llama3_scaling_is_read() -> None:
    spec = read_spec(
        {
            **LLAMA,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 5.0,
                "original_max_position_embeddings": 64,
            },
        }
    )
    assert spec.rope_scaling == RopeScaling(
        "llama3", 8.0, 64, low_frequency_factor=1.5, high_frequency_factor=5.0
    )
    assert spec.max_positions == 512


def test_yarn_with_the_trained_length_in_the_config_serves_the_extended_length() -> None:
    spec = read_spec(
        {
            **LLAMA,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "truncate": False,
            },
        }
    )
    assert spec.rope_scaling == RopeScaling(
        "yarn", 4.0, 512, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.9, truncate=False
    )
    assert spec.max_positions == 2048


def test_longrope_factor_is_the_ratio_of_the_two_lengths() -> None:
    spec = read_spec(
        {
            **LLAMA,
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "su", "short_factor": [1, 2], "long_factor": [3, 4]},
        }
    )
    scaling = spec.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("longrope", 4.0, 128)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0, 2.0), (3.0, 4.0))
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


def test_unknown_rope_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'mrope'.*linear"):
        read_spec({**LLAMA, "rope_scaling": {"type": "mrope"}})


@pytest.mark.parametrize(
    ("given", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 32}, 32)],
)
def test_mistral_sliding_window_is_read(given: dict[str, Any], window: int | None) -> None:
    spec = read_spec(
        {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, **given}
    )
    assert (spec.sliding_window, spec.sliding_layers) == (window, None)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("given", "window", "layers"),
    [
        ({"sliding_window": 32}, None, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, None, None),
        (
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            32,
            (False, True, True),
        ),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, 32, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            32,
            (True, False, False),
        ),
    ],
)
def test_qwen_sliding_window_layers_are_read(
    architecture: str, given: dict[str, Any], window: int | None, layers: Any
) -> None:
    spec = read_spec({**LLAMA, "architectures": [architecture], **given})
    assert (spec.sliding_window, spec.sliding_layers) == (window, layers)


def test_qwen_families_differ_in_biases_norms_and_head_size() -> None:
    two = read_spec({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    three = read_spec({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (two.qkv_bias, two.o_proj_bias, two.qk_norm, two.head_size) == (True, False, False, 16)
    assert (three.qkv_bias, three.o_proj_bias, three.qk_norm, three.head_size) == (
        False,
        False,
        True,
        128,
    )


def test_gpt2_spec() -> None:
    spec = read_spec(
        {
            "model_type": "gpt2",
            "vocab_size": 100,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 3,
            "n_ctx": 64,
        }
    )
    assert spec == ModelSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=100,
        hidden_size=48,
        layers=2,
        heads=3,
        kv_heads=3,
        head_size=16,
        ffn_size=192,
        max_positions=64,
        activation="gelu_tanh",
        gated_mlp=False,
        norm="layer",
        norm_epsilon=1e-5,
        position="learned",
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    )


GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
}


def test_gpt2_with_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="add_cross_attention=True"):
        read_spec({**GPT2, "add_cross_attention": True})


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, [0.25, 0.25]),
        ({"scale_attn_by_inverse_layer_idx": True}, [0.25, 0.125]),
        ({"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}, [1.0, 0.5]),
    ],
)
def test_gpt2_scales_scores_by_layer(options: dict[str, Any], scales: list[float]) -> None:
    spec = read_spec({**GPT2, **options})
    assert [spec.scale_of_layer(layer) for layer in range(2)] == pytest.approx(scales)


def test_unsupported_architecture_error_lists_supported_ones_and_unknown_tensors() -> None:
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.3.w1.weight",
        "model.layers.1.mlp.experts.7.w1.weight",
        "model.layers.1.mlp.selector.weight",
    ]
    with pytest.raises(UnsupportedModel) as refusal:
        find_family({"architectures": ["MambaForCausalLM"]}, names)
    text = str(refusal.value)
    for family in FAMILIES:
        assert family.architectures[0] in text
    assert text.startswith("architecture MambaForCausalLM is not supported")
    assert text.endswith(
        ": model.layers.N.mlp.experts.N.w1.weight, model.layers.N.mlp.selector.weight"
    )


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Gemma3nForConditionalGeneration", "layers share keys and values.*use Gemma 3$"),
        ("Qwen3NextForCausalLM", "a state for each sequence.*use Qwen3 with experts"),
        ("DeepseekV32ForCausalLM", "sparse attention.*use DeepSeek V3 or V3.1$"),
    ],
)
def test_known_architectures_that_are_not_served_say_why(architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^architecture {architecture} .*{reason}"):
        find_family({"architectures": [architecture]})


def test_a_missing_size_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'intermediate_size'"):
        read_spec({key: value for key, value in LLAMA.items() if key != "intermediate_size"})


OTHER_NAMES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "ffn_dim": 160,
    "attention_bias": True,
    "mlp_bias": True,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers": 3,
    "n_heads": 4,
    "d_model": 64,
    "num_layers": 3,
    "ffn_hidden_size": 160,
}
TEXT = {"text_config": {**LLAMA, "num_key_value_heads": 2}}
OWN_NAMES: dict[str, dict[str, Any]] = {
    "granite4": {"layer_types": ["attention"] * 3, "num_local_experts": 0},
    "llama4_vision": TEXT,
    "mistral3": TEXT,
}
FAMILY_IDS = [family.name for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_every_parameter_of_a_spec_has_a_recipe_in_its_family(family: Family) -> None:
    spec = family.spec({**LLAMA, **OTHER_NAMES, **OWN_NAMES.get(family.name, {})})
    used: set[tuple[str, int | None]] = set()
    for name, shape in checkpoint_shapes(spec).items():
        recipe = family.weights.recipe(name, spec)
        assert all(family.weights.knows(source) for source in recipe.sources)
        taken = None if recipe.rows is None else recipe.rows()
        assert taken is None or len(taken) == len(set(taken)) == shape[0]
        for source in recipe.sources:
            rows = {(source, row) for row in taken or [None]}
            assert not rows & used, "no row is used twice"
            used |= rows


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_a_spec_is_the_same_after_writing_and_reading_its_config(family: Family) -> None:
    own = OWN_NAMES.get(family.name, {})
    spec = family.spec({**LLAMA, **OTHER_NAMES, "sliding_window": 32, **own})
    assert ModelSpec.from_config(json.loads(json.dumps(spec.to_config()))) == spec


def test_an_old_config_without_experts_and_softcaps_is_still_read() -> None:
    spec = read_spec(LLAMA)
    new = (
        "norm_offset",
        "inter_layernorms",
        "parallel_attention",
        "shared_norm",
        "embedding_scale",
        "attention_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope_local_base_freq",
        "head_bias",
        "moe",
        "norms_after",
        "final_norm",
        "word_embed_proj_dim",
    )
    assert (
        ModelSpec.from_config(
            {key: value for key, value in spec.to_config().items() if key not in new}
        )
        == spec
    )


def make_config(architecture: str, **options: Any) -> dict[str, Any]:
    return {**LLAMA, **OTHER_NAMES, "architectures": [architecture], **options}


def test_gemma_spec() -> None:
    spec = read_spec(make_config("GemmaForCausalLM", hidden_act="gelu"))
    assert (spec.norm_offset, spec.embedding_scale, spec.head_size) == (1.0, 8.0, 256)
    assert (spec.activation, spec.tied_embeddings, spec.output_norms) == ("gelu_tanh", True, False)


def test_gemma2_defaults() -> None:
    spec = read_spec(make_config("Gemma2ForCausalLM"))
    assert (spec.attention_softcap, spec.final_softcap, spec.attention_scale) == (
        50.0,
        30.0,
        1 / 16,
    )
    assert (spec.sliding_window, spec.sliding_layers) == (4096, (True, False, True))
    assert spec.output_norms


def test_gemma2_without_softcaps_or_windows() -> None:
    spec = read_spec(
        make_config(
            "Gemma2ForCausalLM",
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            sliding_window=None,
        )
    )
    assert (spec.attention_softcap, spec.final_softcap, spec.sliding_window) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    "given",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
)
def test_gemma3_rope_parameters_are_read_in_both_forms(given: dict[str, Any]) -> None:
    spec = read_spec(make_config("Gemma3ForCausalLM", sliding_window_pattern=3, **given))
    assert (spec.rope_theta, spec.sliding_rope_theta, spec.rope_scaling) == (
        5e5,
        2e4,
        RopeScaling("linear", 8.0, 512),
    )
    assert (spec.max_positions, spec.sliding_layers) == (512, (True, True, False))
    assert [spec.theta_of_layer(layer) for layer in range(3)] == [2e4, 2e4, None]


def test_multimodal_gemma3_is_read_from_its_text_config_with_defaults() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    }
    spec = read_spec(config)
    assert (spec.vocab_size, spec.heads, spec.kv_heads, spec.head_size) == (262208, 8, 4, 256)
    assert (spec.max_positions, spec.rope_theta, spec.sliding_rope_theta) == (131072, 1e6, 1e4)
    assert spec.sliding_layers is not None
    assert [layer for layer in range(34) if not spec.sliding_layers[layer]] == [5, 11, 17, 23, 29]
    weights = find_family(config).weights
    for stored in (
        "language_model.model.norm.weight",
        "model.language_model.norm.weight",
        "model.norm.weight",
    ):
        assert weights.canonical(stored) == "model.norm.weight"
    for other in (
        "vision_tower.vision_model.x.weight",
        "model.vision_tower.y.bias",
        "multi_modal_projector.z",
    ):
        assert weights.ignores(weights.canonical(other))


def test_phi3_spec() -> None:
    spec = read_spec(
        make_config(
            "Phi3ForCausalLM",
            sliding_window=2047,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=128,
            rope_scaling={"type": "yarn", "short_factor": [1, 2], "long_factor": [3, 4]},
        )
    )
    assert (spec.sliding_window, spec.rotary_fraction, spec.norm_epsilon) == (2047, 0.75, 1e-5)
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.kind, spec.rope_scaling.original_positions) == ("longrope", 128)


def test_phi3_fc_and_gate_are_halves_of_one_tensor() -> None:
    config = make_config("Phi3ForCausalLM")
    spec, weights = read_spec(config), find_family(config).weights
    halves = [
        weights.recipe(f"transformer.layers.2.mlp.{half}.weight", spec) for half in ("fc", "gate")
    ]
    assert [half.sources for half in halves] == [("model.layers.2.mlp.gate_up_proj.weight",)] * 2
    assert [half.rows() for half in halves if half.rows] == [range(160), range(160, 320)]


def test_rows_of_interleaved_q_k_v_heads_are_reordered() -> None:
    spec = replace(read_spec(LLAMA), heads=4, kv_heads=2, head_size=2)
    # stored: q0 q1 k0 v0 q2 q3 k1 v1, two rows each
    assert grouped_heads(spec) == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def test_interleaved_rope_pairs_become_halves() -> None:
    spec = replace(read_spec(LLAMA), heads=1, kv_heads=1, head_size=6, rotary_fraction=4 / 6)
    assert paired_rotation(spec) == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17]


def test_three_variants_of_falcon() -> None:
    seven = read_spec(make_config("FalconForCausalLM"))
    forty = read_spec(
        make_config("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2)
    )
    first = read_spec(
        make_config("FalconForCausalLM", multi_query=False, parallel_attn=False, num_kv_heads=4)
    )
    assert [
        (spec.kv_heads, spec.parallel_residual, spec.shared_norm) for spec in (seven, forty, first)
    ] == [(1, True, True), (2, True, False), (4, False, False)]
    assert seven.tied_embeddings


def test_expert_sizes_are_read() -> None:
    mixtral = read_spec(make_config("MixtralForCausalLM", num_local_experts=8))
    qwen = read_spec(make_config("Qwen3MoeForCausalLM", moe_intermediate_size=32, head_dim=128))
    assert (mixtral.experts, mixtral.rope_theta) == (Experts(8, 2, 160), 1e6)
    assert (qwen.experts, qwen.head_size, qwen.qk_norm) == (
        Experts(4, 2, 32, normalised=False),
        128,
        True,
    )
    shared = read_spec(
        make_config("Qwen2MoeForCausalLM", norm_topk_prob=True, shared_expert_intermediate_size=48)
    )
    assert (shared.experts, shared.qkv_bias) == (Experts(4, 2, 1408, shared_ffn_size=48), True)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"mlp_only_layers": [2]}, (True, True, False)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, None),
    ],
)
def test_layers_without_experts_are_read(
    options: dict[str, Any], layers: tuple[bool, ...] | None
) -> None:
    spec = read_spec(make_config("Qwen3MoeForCausalLM", moe_intermediate_size=32, **options))
    assert spec.experts is not None
    assert spec.experts.layers == layers
    assert ModelSpec.from_config(json.loads(json.dumps(spec.to_config()))) == spec
    dense = [
        index
        for index in range(3)
        if f"transformer.layers.{index}.mlp.fc.weight" in checkpoint_shapes(spec)
    ]
    assert dense == [index for index, has in enumerate(layers or ()) if not has]
    assert spec.ffn_sizes == ((32,) if layers is None else (32, 160))


def test_opt_with_post_norms_and_small_embeddings() -> None:
    spec = read_spec(
        make_config("OPTForCausalLM", do_layer_norm_before=False, word_embed_proj_dim=32)
    )
    assert (spec.norms_after, spec.final_norm, spec.embedding_width) == (True, False, 32)
    for other in ("final_norm", "output_norms", "parallel_residual"):
        with pytest.raises(
            ValueError, match="norms_after go with layer norm, a plain residual and no final norm"
        ):
            replace(spec, **{other: True})
    assert ModelSpec.from_config(json.loads(json.dumps(spec.to_config()))) == spec
    assert spec.parameters() == sum(
        prod(shape)
        for name, shape in checkpoint_shapes(spec).items()
        if len(shape) == 2 and "position" not in name
    )


REFUSED = [
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (
        "Gemma2ForCausalLM",
        {"layer_types": ["chunked_attention"] * 3},
        "layer_types.*'chunked_attention'",
    ),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
        "rope_type=yarn of sliding_attention",
    ),
    (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn=False",
    ),
    ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
    ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}, "'n_group'"),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave=False"),
    ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func=softmax"),
    (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 10},
        "2 experts a token cannot be chosen from 4 of 8 groups of 10 experts",
    ),
    ("BertModel", {"position_embedding_type": "relative_key"}, "relative_key"),
    ("BertForSequenceClassification", {}, "token types.*XLMRobertaForSequenceClassification"),
    ("RobertaModel", {"pad_token_id": 0}, "pad_token_id=0"),
    ("GptOssForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 experts a token, of 8"),
    (
        "MixtralForCausalLM",
        {"num_local_experts": 10**9},
        "2 experts a token, of 1000000000; the most are",
    ),
    ("GPTNeoXForCausalLM", {"num_attention_heads": 10**9}, "head_size is 0"),
    ("Phi3ForCausalLM", {"hidden_act": "mish"}, "'mish'"),
]


@pytest.mark.parametrize(("architecture", "options", "message"), REFUSED)
def test_an_unsupported_option_is_refused_with_its_field_name(
    architecture: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_spec(make_config(architecture, **options))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"architectures": ["MedusaModel"]},
            r"draft heads \(MedusaModel\).*decoding_mode lookahead",
        ),
        (
            {"medusa_num_heads": 4, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"},
            r"draft heads \(Medusa\).*serve lmsys/vicuna-7b-v1.3 with decoding_mode lookahead",
        ),
        # a draft whose config names the model's own architecture
        ({**LLAMA, "architectures": ["LlamaForCausalLM"], "medusa_num_heads": 4}, "draft heads"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "draft heads"),
        ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, "a smaller model as its draft"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "it reads images"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "it reads images"),
        ({"architectures": ["OtherForCausalLM"], "vision_config": {"a": 1}}, "it reads images"),
        ({"architectures": ["DistilBertModel"]}, "it is an encoder.*Qwen3-Embedding"),
        ({"architectures": ["ElectraForSequenceClassification"]}, "it is an encoder"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "an encoder and a decoder"),
        (
            {"architectures": ["OtherMoeForCausalLM"], "num_local_experts": 8},
            "architecture OtherMoeForCausalLM is not supported: its experts.*Mixtral",
        ),
    ],
)
def test_a_kind_of_model_is_refused_with_what_to_use(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        find_family(config)
