"""Beams, samples of one prompt, draft tokens, windows and host memory on a GPU give the tokens of
the CPU engine.

    pytest -m gpu tests/engine/test_gpu_features.py
"""

import random

import pytest
import torch
from run_engine import generate, run_all
from scheduler_harness import Revising
from tiny_models import VOCABULARY, config_of, engine_tensors, positions_of, random_model

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine

pytestmark = pytest.mark.gpu
LENGTH = 320


@pytest.fixture(scope="module")
def model():
    return random_model(config_of("llama", **positions_of("llama", LENGTH))).eval()


def engine_on(device, model, **settings):
    spec, tensors = engine_tensors(model)
    values = {"max_rows": 16, "cache_tokens": 8192, **settings}
    return create_engine(
        spec, tensors, EngineSettings(dtype="float32", device=device, **values), LENGTH
    )


def prompts(count):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        for n in (1, 31, 32, 33, 77, 128)[:count]
    ]


def test_gpu_beams_equal_cpu_beams_beside_other_requests(model):
    requests = []
    for index, prompt in enumerate(prompts(6)):
        requests.append(
            GenerateRequest(
                2 * index,
                prompt,
                SamplingParams(
                    max_tokens=24,
                    beam_width=2 + index % 4,
                    length_penalty=0.5 * index,
                    end_ids=(index + 3,),
                    early_stopping=index % 3,
                ),
            )
        )
        requests.append(
            GenerateRequest(
                2 * index + 1, prompt, SamplingParams(max_tokens=30, temperature=1.0, seed=4)
            )
        )
    expected = run_all(engine_on("cpu", model), requests)
    for way in (
        {},
        {"step_tokens": 40},
        {"block_tokens": 16},
        {"overlap": False},
        {"policy": "max_utilization", "cache_tokens": 1024},
    ):
        found = run_all(engine_on("cuda", model, **way), requests)
        assert {r: [b.tokens for b in beams] for r, beams in found.beams.items()} == {
            r: [b.tokens for b in beams] for r, beams in expected.beams.items()
        }
        assert found == expected


def test_samples_of_one_prompt_share_its_blocks(model):
    prompt = prompts(5)[4]
    requests = [
        GenerateRequest(
            i,
            prompt,
            SamplingParams(max_tokens=30, temperature=1.0, seed=i),
            shares_prompt_with=0 if i else None,
        )
        for i in range(6)
    ]
    alone = [
        run_all(engine_on("cpu", model), [GenerateRequest(i, prompt, requests[i].sampling)])[i]
        for i in range(6)
    ]
    found = run_all(engine_on("cuda", model, reuse=False), requests)
    assert [found[i] for i in range(6)] == alone
    assert found.cached[5] == len(prompt) - 1


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.05, "seed": 3}, {"temperature": 1.0, "top_k": 8, "seed": 2}]
)
def test_draft_tokens_change_only_the_number_of_steps(model, sampling):
    asked = [prompt * 2 for prompt in prompts(5)]
    expected = generate(engine_on("cuda", model), asked, max_tokens=60, **sampling)
    loop = engine_on("cuda", model, lookup_tokens=5)
    assert generate(loop, asked, max_tokens=60, **sampling) == expected
    assert loop.stats().draft_tokens > 0


def revised_answers(device, model) -> dict[int, list[int]]:
    """Return the answers of six requests in one batch. Every second one is revised."""
    loop = engine_on(device, model, block_tokens=16)
    for index, prompt in enumerate(prompts(6)):
        request = GenerateRequest(index, prompt, SamplingParams(max_tokens=40))
        loop.scheduler.add(request, Revising() if index % 2 else None)
    return run_all(loop, [])


def test_gpu_outputs_that_a_constraint_revises_equal_the_cpus(model):
    """Replaced and appended tokens are computed in chunks, between steps that are graphs."""
    assert revised_answers("cuda", model) == revised_answers("cpu", model)


@pytest.mark.parametrize(("windows", "sinks"), [((40,), 0), ((40,), 4), ((24, 100), 0)])
def test_gpu_windows_and_sinks_equal_the_cpus(model, windows, sinks):
    settings = {"attention_windows": windows, "sink_tokens": sinks}
    expected = generate(engine_on("cpu", model, **settings), prompts(6), max_tokens=60)
    assert generate(engine_on("cuda", model, **settings), prompts(6), max_tokens=60) == expected


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(
    "way", [{}, {"overlap": False}, {"policy": "max_utilization"}, {"lookup_tokens": 3}]
)
def test_requests_longer_than_the_cache_run_with_a_sliding_window(model, sinks, way):
    """Released blocks are reused: 224 tokens of cache serve requests of 300 and 188 tokens at the
    same time.
    """
    settings = {"attention_windows": (40,), "sink_tokens": sinks}
    asked = [prompts(6)[5] * 2, prompts(6)[5]]
    expected = generate(engine_on("cpu", model, **settings), asked, max_tokens=60)
    loop = engine_on(
        "cuda", model, cache_tokens=224, block_tokens=16, step_tokens=48, **settings, **way
    )
    for _ in range(2):
        assert generate(loop, asked, max_tokens=60) == expected


def test_host_memory_restores_evicted_blocks(model):
    asked = [[first, *range(90)] for first in range(6)]
    expected = generate(engine_on("cpu", model), asked, max_tokens=10)
    loop = engine_on("cuda", model, cache_tokens=160, max_rows=1, host_cache_bytes=1 << 20)
    for _ in range(2):
        assert [generate(loop, [prompt], max_tokens=10)[0] for prompt in asked] == expected
    assert loop.stats().cached_prompt_tokens >= 6 * 64


def test_random_cancels_release_every_row_and_block(model):
    chance = random.Random(3)
    loop = engine_on(
        "cuda",
        model,
        cache_tokens=2048,
        policy="max_utilization",
        lookup_tokens=2,
        host_cache_bytes=1 << 20,
    )
    live = []
    for request_id in range(1000):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 80))]
        sampling = SamplingParams(
            max_tokens=chance.randrange(1, 30), beam_width=chance.choice([1, 1, 3])
        )
        loop.submit(
            GenerateRequest(request_id, prompt, sampling, shares_prompt_with=request_id - 1)
        )
        live.append(request_id)
        while len(live) > 8:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.3:
            loop.step()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.check_integrity()
    assert loop.stats().free_blocks == loop.stats().total_blocks
