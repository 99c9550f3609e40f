"""Families on compiled CPU code: logits are those of transformers, tokens those of torch's path."""

import numpy as np
import pytest
import torch
from compiled_engines import context_logits, start_compiled, start_torch
from family_variants import VARIANTS
from run_engine import generate
from tiny_models import VOCABULARY, config_of, engine_tensors, folder_tensors, random_model

from slipstream.engine.cpu.support import unsupported

LENGTH = 45
TOKENS = torch.randint(
    3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5)
).tolist()
PROMPTS = [TOKENS[:3], TOKENS, [9] * 40, TOKENS[5:25], [33]]
TOLERANCE = 2e-5

# variant → why torch computes it
ON_TORCH = {
    "baichuan2": "heads have 8 elements",
    "dbrx": "the model has experts",
    "deepseek2": "the model has experts",
    "deepseek2-lite": "the model has experts",
    "deepseek3": "the model has experts",
    "deepseek3-one-group": "the model has experts",
    "glm4-9b": "heads have 24 elements",
    "gptoss": "the model has experts",
    "gptoss-bounds": "the model has experts",
    "internlm3": "heads have 24 elements",
    "llama4": "the model has experts",
    "llama4-some-dense": "the model has experts",
    "nemotron": "heads have 24 elements",
}
COMPILED = [name for name in VARIANTS if name not in ON_TORCH]
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
