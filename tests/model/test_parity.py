"""Every family and option against transformers: logits within 1e-5, 128 greedy tokens the same.

That greedy answers are the same is checked from our tokens: after every prefix of prompt and
answer, transformers chooses the token that we gave next. By induction its own greedy answer is
ours.
"""

import json
from dataclasses import replace

import pytest
import torch
from dequantised import dequantise
from run_engine import all_logits, engine, generate, greedy_choices, logits_of, run_all
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, config_of, positions_of, random_model

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import BuildLimits
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources.open_source import open_source

LENGTH = 320
ROPE = {"rope_theta": 10000.0}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-large-heads": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama-3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 500000.0,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 80,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-layers-slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {}),
    "gemma3-stretched": (
        "gemma3",
        {
            "final_logit_softcapping": 1.0,
            "attention_bias": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 80000.0, "factor": 8.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window-partial": (
        "phi3",
        {
            "sliding_window": 24,
            "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "opt": ("opt", {}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-small-embedding-no-final-norm": (
        "opt",
        {"word_embed_proj_dim": 48, "_remove_final_layer_norm": True},
    ),
    "opt-untied-no-bias": (
        "opt",
        {"tie_word_embeddings": False, "enable_bias": False, "activation_function": "gelu"},
    ),
    "gptj": ("gptj", {}),
    "gptj-whole-head": ("gptj", {"rotary_dim": 16, "n_inner": 96}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "falcon",
        {"parallel_attn": False, "multi_query": False, "bias": True, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 24, "num_local_experts": 2}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-normalised": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe-every-other-layer": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}),
    "qwen3_moe-normalised": (
        "qwen3_moe",
        {
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_experts": 16,
            "num_experts_per_tok": 8,
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request, tmp_path_factory):
    family, options = VARIANTS[request.param]
    config = config_of(family, **{**positions_of(family, LENGTH), **options})
    model = random_model(config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "hf")
    built = build_engine(folder / "hf", folder / "engine", dtype="float32")
    assert isinstance(engine(built).runner, CpuRunner)
    return model, built


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        for n in (1, 16, 17, 40, 77)
    ]


@pytest.fixture(scope="module")
def answers(pair):
    return generate(engine(pair[1]), prompts(), max_tokens=128)


def test_greedy_tokens_are_those_of_transformers(pair, answers):
    model, _ = pair
    sequences = [prompt + answer for prompt, answer in zip(prompts(), answers, strict=True)]
    for prompt, answer, chosen in zip(
        prompts(), answers, greedy_choices(model, sequences), strict=True
    ):
        assert len(answer) == 128
        assert answer == chosen[len(prompt) - 1 : -1]


def test_logits_are_within_1e_5(pair):
    model, folder = pair
    for sequence, ours in zip(prompts(), all_logits(folder, torch.float32, prompts()), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([sequence])).logits[0]
        assert (ours - theirs).abs().max() < 1e-5


def test_prompts_cut_into_steps_give_the_same_tokens(pair, answers):
    _, folder = pair
    cut = generate(engine(folder, step_tokens=24, reuse=False), prompts(), max_tokens=8)
    assert cut == [answer[:8] for answer in answers]


def test_dynamic_scaling_is_served_up_to_the_trained_length(tmp_path):
    scaling = {**ROPE, "rope_type": "dynamic", "factor": 4.0}
    config = config_of("llama", max_position_embeddings=96, rope_parameters=scaling)
    model = random_model(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight *= 10  # positions matter more
    model.save_pretrained(tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (150,), generator=draw).tolist()

    def difference(count: int) -> float:
        ours = all_logits(folder, torch.float32, [tokens[:count]])[0]
        with torch.inference_mode():
            return float((ours - model(torch.tensor([tokens[:count]])).logits[0]).abs().max())

    assert difference(96) < 1e-5
    assert difference(150) > 1e-2  # so the engine must not accept such a sequence
    loop = engine(folder)
    answers = run_all(loop, [GenerateRequest(0, tokens[:90], SamplingParams(max_tokens=50))])
    assert "exceed the longest sequence, 96 tokens" in answers.errors[0]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 30.0],
}


@pytest.mark.parametrize(
    ("longest", "lengths"), [(40, (1, 16, 39)), (LENGTH, (41, 64, 77))], ids=["short", "long"]
)
def test_longrope_takes_the_factors_of_the_longest_sequence_served(tmp_path, longest, lengths):
    config = config_of(
        "phi3",
        max_position_embeddings=LENGTH,
        original_max_position_embeddings=40,
        rope_parameters=LONGROPE,
    )
    model = random_model(config).eval()
    model.save_pretrained(tmp_path / "hf")
    limits = BuildLimits.for_model(open_source(str(tmp_path / "hf")).spec)
    folder = build_engine(
        tmp_path / "hf",
        tmp_path / "engine",
        dtype="float32",
        limits=replace(limits, max_seq_len=longest),
    )
    generator = torch.Generator().manual_seed(5)
    given = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    tokens = min(64, longest - max(lengths))
    answers = generate(engine(folder), given, max_tokens=tokens)
    sequences = [prompt + answer for prompt, answer in zip(given, answers, strict=True)]
    for prompt, answer, chosen in zip(
        given, answers, greedy_choices(model, sequences), strict=True
    ):
        assert len(answer) == tokens
        assert answer == chosen[len(prompt) - 1 : -1]
    opened = read_engine_folder(folder)
    for sequence in sequences:
        ours = logits_of(opened.spec, opened.tensors(), torch.float32, [sequence])[0]
        with torch.inference_mode():
            assert (ours - model(torch.tensor([sequence])).logits[0]).abs().max() < 1e-5


def test_language_model_of_a_gemma3_vision_model(tmp_path):
    model = random_model(config_of("gemma3", max_position_embeddings=LENGTH)).eval()
    model.save_pretrained(tmp_path / "hf")
    text = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": text,
            }
        )
    )
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    seeing = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": torch.ones(2, 3, 4, 4),
        "multi_modal_projector.mm_input_projection_weight": torch.ones(2, 2),
    }
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()} | seeing,
        tmp_path / "hf" / "model.safetensors",
    )
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    for sequence, ours in zip(prompts(), all_logits(folder, torch.float32, prompts()), strict=True):
        with torch.inference_mode():
            assert (ours - model(torch.tensor([sequence])).logits[0]).abs().max() < 1e-5


@pytest.mark.parametrize("weight_only", ["int8", "int4"])
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("llama", True),
        ("mixtral", False),
        ("qwen3_moe", False),
        ("qwen2_moe", False),
        ("gptj", False),
    ],
)
def test_quantised_engine_equals_its_dequantised_weights(tmp_path, weight_only, family, tied):
    config = config_of(family, tie_word_embeddings=tied, **positions_of(family, LENGTH))
    model = random_model(config).eval()
    model.save_pretrained(tmp_path / "hf")
    engine_folder = build_engine(
        tmp_path / "hf", tmp_path / "engine", dtype="float32", weight_only=weight_only
    )
    opened = read_engine_folder(engine_folder)
    stored = opened.tensors()
    meant = {name: tensor for name, tensor in stored.items() if not name.endswith(".scales")}
    for name in [name for name in stored if name.endswith(".scales")]:
        weight = name.replace(".scales", ".weight")
        meant[weight] = dequantise(stored[weight], stored[name])
    ours = all_logits(engine_folder, torch.float32, prompts())
    for expected, got in zip(
        logits_of(opened.spec, meant, torch.float32, prompts()), ours, strict=True
    ):
        assert (got - expected).abs().max() < 1e-4
    assert any(name.endswith((".mlp.proj.scales", ".mlp.experts.proj.scales")) for name in stored)
    assert not any(name.endswith(".router.scales") for name in stored)
