"""With `deterministic` on a GPU, a request gets the same tokens and log-probabilities, to the last
bit, in bfloat16, whatever else is in the batch, with graphs and without.
"""

import pytest
import torch
from run_engine import run_all
from tiny_models import VOCABULARY, config_of, engine_tensors, positions_of, random_model

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine

pytestmark = pytest.mark.gpu
LENGTH = 320
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 5}}
WAYS = {
    "together": {},
    "in steps of 48 tokens": {"step_tokens": 48},
    "without reuse": {"reuse": False},
    "with drafts": {"lookup_tokens": 3},
    "8-bit cache": {"cache_dtype": "fp8"},
}


def some_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (1 + 9 * i,), generator=generator).tolist()
        for i in range(count)
    ]


def answers(engine_parts, prompts, sampling: dict, eager: bool = False, **settings):
    values = {"max_rows": 80, "cache_tokens": 32768, **settings}
    chosen = EngineSettings(dtype="bfloat16", device="cuda", deterministic=True, **values)
    spec, tensors = engine_parts
    loop = create_engine(spec, dict(tensors), chosen, LENGTH)
    if eager:
        loop.runner.graphs._graphs.clear()
    parameters = SamplingParams(max_tokens=40, log_probs=True, **sampling)
    requests = [GenerateRequest(i, prompt, parameters) for i, prompt in enumerate(prompts)]
    found = run_all(loop, requests)
    return [(found[i], found.log_probs[i]) for i in range(len(prompts))]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "qwen3"])
def test_other_requests_change_no_bit(family, sampling):
    model = random_model(config_of(family, **positions_of(family, LENGTH)))
    parts = engine_tensors(model)
    prompts = some_prompts(30)
    for way, settings in WAYS.items():
        alone = [
            answers(parts, [prompt], SAMPLING[sampling], **settings)[0] for prompt in prompts[::10]
        ]
        together = answers(parts, prompts * 3, SAMPLING[sampling], **settings)
        assert together[:30:10] == alone, way
        assert together[30:60] == together[:30], way
        eager = answers(parts, prompts, SAMPLING[sampling], eager=True, **settings)
        assert eager[::10] == alone, way
