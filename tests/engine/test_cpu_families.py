"""Families on compiled CPU code: logits are those of transformers, tokens those of torch's path."""

import numpy as np
import pytest
import torch
from compiled_engines import context_logits, logits_of_rank, start_compiled, start_torch
from cpu_steps import best_level
from family_variants import VARIANTS
from run_engine import generate
from thread_ranks import ThreadRanks, on_ranks
from tiny_models import VOCABULARY, config_of, engine_tensors, folder_tensors, random_model

from slipstream.engine.cpu.support import unsupported
from slipstream.kernels.cpu.objects import load_code
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.shards import rank_spec, rank_weights

LENGTH = 45
TOKENS = torch.randint(
    3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5)
).tolist()
PROMPTS = [TOKENS[:3], TOKENS, [9] * 40, TOKENS[5:25], [33]]
STEPS = (19, 20, 1, 1, 4)  # tokens of each step
TOLERANCE = 2e-5

# variant → why torch computes it
ON_TORCH = {
    "baichuan2": "heads have 8 elements",
    "deepseek2": "keys and values come from latent vectors",
    "deepseek2-lite": "keys and values come from latent vectors",
    "deepseek3": "keys and values come from latent vectors",
    "deepseek3-one-group": "keys and values come from latent vectors",
    "glm4-9b": "heads have 24 elements",
    "internlm3": "heads have 24 elements",
    "nemotron": "heads have 24 elements",
}
COMPILED = [name for name in VARIANTS if name not in ON_TORCH]
# one for each option that ranks divide in a way of its own; the others are slow together
DIVIDED = (
    "bloom",
    "cohere-qk-norm",
    "dbrx",
    "gptoss",
    "granite",
    "llama4",
    "mpt-six-heads",
    "olmo2",
    "phi-qk-norm",
    "starcoder",
)
# options of families that transformers can write without a variant
OTHERS = {
    "opt": {},
    "opt-350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt-small-embedding": {"word_embed_proj_dim": 48, "_remove_final_layer_norm": True},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function: variant → its model, spec and tensors."""
    found = {}

    def write(name):
        if name not in found:
            model = VARIANTS[name].model()
            folder = tmp_path_factory.mktemp(name)
            VARIANTS[name].write(model, folder)
            found[name] = (model, *folder_tensors(folder))
        return found[name]

    return write


@pytest.mark.parametrize("name", ON_TORCH)
def test_some_variants_are_left_to_torch(name, written):
    _, spec, _ = written(name)
    assert ON_TORCH[name] in unsupported(spec, "float32")


@pytest.mark.parametrize("name", COMPILED)
def test_logits_are_those_of_transformers(name, written):
    model, spec, tensors = written(name)
    expected = VARIANTS[name].logits(model, TOKENS).numpy()
    for settings in ({}, {"step_tokens": 7, "threads": 3}):
        loop = start_compiled((spec, tensors), **settings)
        found = context_logits(loop, TOKENS, spec.vocab_size)
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", COMPILED)
def test_tokens_are_those_of_torch(name, written):
    _, spec, tensors = written(name)
    compiled = generate(start_compiled((spec, tensors)), PROMPTS, max_tokens=24)
    assert compiled == generate(start_torch((spec, tensors)), PROMPTS, max_tokens=24)


@pytest.mark.parametrize("name", COMPILED)
def test_bfloat16_is_close_to_float32(name, written):
    """In bfloat16, attention of a prompt computes tiles of queries."""
    model, spec, tensors = written(name)
    expected = VARIANTS[name].logits(model, TOKENS).numpy()
    found = context_logits(start_compiled((spec, tensors), "bfloat16"), TOKENS, spec.vocab_size)
    assert np.abs(found - expected).mean() < 0.02 * expected.std()


def check_two_ranks(folder, expected):
    load_code(best_level(), None)  # not in several threads

    def run(ranks: ThreadRanks) -> np.ndarray:
        weights = rank_weights(folder, ranks.rank, ranks.size)
        return logits_of_rank(rank_spec(folder.spec, ranks.size), weights, TOKENS, STEPS, ranks)

    for found in on_ranks(2, run):
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DIVIDED else [pytest.mark.slow]) for name in COMPILED],
)
def test_two_ranks_compute_the_logits_of_transformers(name, tmp_path):
    variant = VARIANTS[name]
    model = variant.model()
    variant.write(model, tmp_path / "hf")
    folder = read_engine_folder(build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32"))
    expected = variant.logits(model, TOKENS).numpy()
    check_two_ranks(folder, expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_ranks_hold_whole_experts_or_a_part_of_each(family, tmp_path):
    model = random_model(config_of(family)).eval()
    model.save_pretrained(tmp_path / "hf")
    built = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    check_two_ranks(read_engine_folder(built), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_of_embeddings_and_norms_behind_layers(name):
    model = random_model(config_of("opt", **OTHERS[name])).eval()
    pair = engine_tensors(model)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    found = context_logits(start_compiled(pair), TOKENS, VOCABULARY)
    assert np.abs(found - expected).max() < TOLERANCE
    tokens = generate(start_compiled(pair), PROMPTS, max_tokens=24)
    assert tokens == generate(start_torch(pair), PROMPTS, max_tokens=24)
