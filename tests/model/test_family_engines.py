"""Families with attention or experts of their own, through the engine: 128 greedy tokens are those
of transformers, also where prompts are cut into steps and where their beginning is in the cache.
"""

import pytest
import torch
from family_variants import VARIANTS
from run_engine import engine, generate, greedy_choices, run_all
from tiny_models import VOCABULARY

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.with_torch.runner import Runner
from slipstream.weights.build import build_engine

LENGTH = 320
# latent vectors: torch computes them
ON_TORCH = ("deepseek2", "deepseek3")
SHARED = torch.randint(0, VOCABULARY, (64,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture(
    scope="module",
    params=[
        "bloom",
        "deepseek2",
        "deepseek3",
        "gptoss",
        "gpt2-scaled-by-layer",
        "olmo3",
        "opt-plain-norms",
        "smollm3",
    ],
    ids=str,
)
def pair(request, tmp_path_factory):
    variant = VARIANTS[request.param].with_positions(LENGTH)
    model = variant.model()
    folder = tmp_path_factory.mktemp(request.param)
    variant.write(model, folder / "hf")
    built = build_engine(folder / "hf", folder / "engine", dtype="float32")
    assert isinstance(engine(built).runner, Runner if request.param in ON_TORCH else CpuRunner)
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
    sequences = [prompt + answer for prompt, answer in zip(prompts(), answers, strict=True)]
    for prompt, answer, chosen in zip(
        prompts(), answers, greedy_choices(pair[0], sequences), strict=True
    ):
        assert len(answer) == 128
        assert answer == chosen[len(prompt) - 1 : -1]


def test_prompts_cut_into_steps_give_the_same_tokens(pair, answers):
    cut = generate(engine(pair[1], step_tokens=24, reuse=False), prompts(), max_tokens=24)
    assert cut == [answer[:24] for answer in answers]


def test_a_cached_beginning_gives_the_same_tokens(pair):
    given = [SHARED + prompt for prompt in prompts()[1:]]
    fresh = generate(engine(pair[1], reuse=False), given, max_tokens=16)
    loop = engine(pair[1])
    found = []
    for number, prompt in enumerate(given):
        request = GenerateRequest(number, prompt, SamplingParams(max_tokens=16))
        reply = run_all(loop, [request])
        found.append(reply[number])
        assert reply.cached[number] == (len(SHARED) if number else 0)
    assert found == fresh
