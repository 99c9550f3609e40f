"""Pooled states on a GPU equal those of transformers, in mixed batches and in several steps.

pytest -m gpu tests/engine/test_gpu_pooling.py
"""

import numpy as np
import pytest
import torch
from run_outputs import run
from tiny_models import VOCABULARY, config_of, expected_tensors, random_model

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import EMBEDDING_KINDS, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.model.families.registry import find_family

pytestmark = pytest.mark.gpu
LENGTH = 320


@pytest.fixture(scope="module")
def model():
    return random_model(config_of("llama", max_position_embeddings=LENGTH)).eval()


def gpu_engine(model, dtype: str, **settings):
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    tensors = {name: tensor.clone() for name, tensor in expected_tensors(model).items()}
    values = {"max_rows": 16, "cache_tokens": 16384, **settings}
    engine_settings = EngineSettings(dtype=dtype, device="cuda", **values)
    return create_engine(find_family(config).spec(config), tensors, engine_settings, LENGTH)


def expected(model, prompt: list[int], kind: str) -> np.ndarray:
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
    count = len(prompt)
    weights = {
        "last": torch.arange(count) == count - 1,
        "cls": torch.arange(count) == 0,
        "mean": torch.ones(count),
        "weightedmean": torch.arange(1, count + 1),
    }[kind].double()
    return (weights @ states / weights.sum()).numpy()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (1 + 31 * i,), generator=generator).tolist()
        for i in range(count)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("step_tokens", [8192, 24])
def test_pooled_states_equal_those_of_transformers(model, dtype, tolerance, step_tokens):
    loop = gpu_engine(model, dtype, step_tokens=step_tokens)
    asked = prompts(9)
    kinds = [*EMBEDDING_KINDS, *EMBEDDING_KINDS, ""]
    requests = [
        GenerateRequest(i, prompt, SamplingParams(max_tokens=1 if kind else 20, pooling=kind))
        for i, (prompt, kind) in enumerate(zip(asked, kinds, strict=True))
    ]
    outputs = run(loop, requests)
    for i, kind in enumerate(kinds):
        if not kind:
            assert len(outputs.tokens[i]) == 20
            continue
        found = np.frombuffer(outputs.scores[i].pooled, dtype=np.float32)
        np.testing.assert_allclose(found, expected(model, asked[i], kind), atol=tolerance)
    # once more: the last token alone is computed, as in a decode step, with cached blocks
    again = run(loop, [GenerateRequest(99, asked[4], SamplingParams(max_tokens=1, pooling="last"))])
    found = np.frombuffer(again.scores[99].pooled, dtype=np.float32)
    np.testing.assert_allclose(found, expected(model, asked[4], "last"), atol=tolerance)
