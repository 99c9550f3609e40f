"""Every family and option against transformers: logits within 1e-4, 128 greedy tokens the same.

That greedy answers are the same is checked from our tokens: after every prefix of prompt and answer,
transformers chooses the token that we gave next. By induction its own greedy answer is ours.
"""

import pytest
import torch
from run_engine import all_logits, engine, generate, greedy_choices, logits_of
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.quantise import dequantise

LENGTH = 320
ROPE = {"rope_theta": 10000.0}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
                                "max_position_embeddings": 128}),
    "llama-3.1": ("llama", {"rope_parameters": {
        "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "llama-yarn": ("llama", {"rope_parameters": {
        **ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-layers-slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request, tmp_path_factory):
    family, options = VARIANTS[request.param]
    length = {"n_positions": LENGTH} if family == "gpt2" else {"max_position_embeddings": LENGTH}
    config = config_of(family, **{**length, **options})
    model = random_model(config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "hf")
    return model, build_engine(folder / "hf", folder / "engine", dtype="float32")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 16, 17, 40, 77)]


def depends_on_length(config) -> bool:
    return getattr(config, "rope_parameters", {}).get("rope_type") == "dynamic"


def generated(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False,
                           eos_token_id=None, pad_token_id=0)
    return found[0, len(prompt):].tolist()


def test_greedy_tokens_are_those_of_transformers(pair):
    model, folder = pair
    answers = generate(engine(folder), prompts(), max_tokens=128)
    if depends_on_length(model.config):
        # One pass over a long sequence turns its early tokens otherwise than generating it does.
        assert answers == [generated(model, prompt) for prompt in prompts()]
        return
    sequences = [prompt + answer for prompt, answer in zip(prompts(), answers, strict=True)]
    for prompt, answer, chosen in zip(prompts(), answers, greedy_choices(model, sequences), strict=True):
        assert len(answer) == 128
        assert answer == chosen[len(prompt) - 1 : -1]


def test_logits_are_within_1e_4(pair):
    model, folder = pair
    for sequence, ours in zip(prompts(), all_logits(folder, torch.float32, prompts()), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([sequence])).logits[0]
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("weight_only", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_engine_computes_with_the_weights_it_stands_for(tmp_path, weight_only, tied):
    model = random_model(config_of("llama", max_position_embeddings=LENGTH, tie_word_embeddings=tied)).eval()
    model.save_pretrained(tmp_path / "hf")
    engine_folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32", weight_only=weight_only)
    opened = read_engine_folder(engine_folder)
    stored = opened.tensors()
    meant = {name: tensor for name, tensor in stored.items() if not name.endswith(".scales")}
    for name in [name for name in stored if name.endswith(".scales")]:
        weight = name.replace(".scales", ".weight")
        meant[weight] = dequantise(stored[weight], stored[name])
    ours = all_logits(engine_folder, torch.float32, prompts())
    for expected, got in zip(logits_of(opened.spec, meant, torch.float32, prompts()), ours, strict=True):
        assert (got - expected).abs().max() < 1e-4
    assert not torch.equal(meant["transformer.layers.0.mlp.proj.weight"], model.model.layers[0].mlp.down_proj.weight)
