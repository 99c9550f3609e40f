"""A request gives the same tokens however it is run: alone or in a batch, chunked, cached or
preempted.
"""

import itertools
import math

import pytest
import torch
from run_engine import engine, generate, record_plans, run_all
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("same")
    random_model(config_of("llama", max_position_embeddings=256)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


def some_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(0, VOCABULARY, (40,), generator=generator).tolist()
    return [
        shared + torch.randint(0, VOCABULARY, (1 + 3 * i,), generator=generator).tolist()
        for i in range(count)
    ]


WAYS = {
    "in steps of 16 tokens": {"step_tokens": 16},
    "whole prompts": {"chunked": False},
    "without reuse": {"reuse": False},
    "one at a time": {"max_rows": 1},
    "small blocks": {"block_tokens": 4},
    "preempted": {
        "policy": "max_utilization",
        "cache_tokens": 320,
        "block_tokens": 16,
        "max_rows": 8,
    },
    "one thread": {"threads": 1},
}


SAMPLING = {
    "greedy": {"max_tokens": 24},
    "top-k": {
        "max_tokens": 24,
        "temperature": 0.8,
        "top_k": 20,
        "seed": 5,
        "repetition_penalty": 1.2,
    },
    "top-p": {
        "max_tokens": 24,
        "temperature": 1.0,
        "top_p": 0.8,
        "seed": 2**63 + 1,
        "frequency_penalty": 0.5,
    },
}


@pytest.fixture(scope="module")
def alone(folder):
    """Return the outputs of the first four prompts, each alone in an engine."""
    return {
        name: [generate(engine(folder), [prompt], **sampling)[0] for prompt in some_prompts(12)[:4]]
        for name, sampling in SAMPLING.items()
    }


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_how_the_engine_is_run(folder, alone, sampling, way):
    prompts = some_prompts(12)
    loop = engine(folder, **WAYS[way])
    together = generate(loop, prompts, **SAMPLING[sampling])
    assert together[:4] == alone[sampling]
    again = generate(loop, prompts, **SAMPLING[sampling])  # the cache is warm now
    assert again == together
    if way == "preempted":
        assert loop.stats().preemptions > 0
    if way not in ("without reuse", "preempted"):
        assert loop.stats().cached_prompt_tokens > 0


def test_a_batch_of_32_equals_each_request_alone(folder):
    prompts = some_prompts(32)
    together = generate(engine(folder, max_rows=32), prompts, max_tokens=30)
    for index in (0, 13, 31):
        assert generate(engine(folder), [prompts[index]], max_tokens=30)[0] == together[index]


def test_log_probs_equal_log_softmax(folder, tmp_path):
    from run_engine import all_logits

    prompt = some_prompts(1)[0]
    sampling = SamplingParams(
        max_tokens=12, temperature=1.0, seed=3, log_probs=True, top_log_probs=4
    )
    answers = run_all(
        engine(folder),
        [
            GenerateRequest(1, prompt, sampling),
            GenerateRequest(2, prompt, SamplingParams(max_tokens=12)),
        ],
    )
    reference = all_logits(folder, torch.float32, [prompt + answers[1]])[0].log_softmax(-1)[
        len(prompt) - 1 : -1
    ]
    for index, token in enumerate(answers[1]):
        assert math.isclose(answers.log_probs[1][index], reference[index, token], abs_tol=1e-4)
        values, ids = reference[index].topk(4)
        found = answers.top_log_probs[1][index]
        assert [token for token, _ in found] == ids.tolist()
        assert all(
            math.isclose(a, b, abs_tol=1e-4)
            for (_, a), b in zip(found, values.tolist(), strict=True)
        )
    assert 2 not in answers.top_log_probs


def test_a_seed_determines_the_sampled_tokens(folder):
    loop = engine(folder)
    prompt = some_prompts(1)[0]
    first, second, other = (
        generate(loop, [prompt], max_tokens=30, temperature=1.5, seed=s)[0] for s in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_sampling_parameters_take_effect(folder):
    loop = engine(folder)
    prompt = some_prompts(1)[0]
    plain = generate(loop, [prompt], max_tokens=20)[0]
    assert (
        generate(loop, [prompt], max_tokens=20, end_ids=(plain[4],))[0]
        == plain[: plain.index(plain[4])]
    )
    longer = generate(loop, [prompt], max_tokens=20, end_ids=(plain[4],), min_tokens=10)[0]
    assert len(longer) >= 10
    assert plain[4] not in longer[:10]
    assert generate(loop, [prompt], max_tokens=3, logit_bias=((7, 1000.0),))[0] == [7, 7, 7]
    banned = generate(loop, [prompt], max_tokens=20, bad_words=((plain[0],), (plain[1], plain[2])))[
        0
    ]
    assert plain[0] not in banned
    assert (plain[1], plain[2]) not in itertools.pairwise(banned)
    # A word's earlier tokens may lie in the prompt.
    across = generate(loop, [prompt], max_tokens=1, bad_words=((prompt[-1], plain[0]),))[0]
    assert across != plain[:1]
    assert len(set(generate(loop, [prompt], max_tokens=30, frequency_penalty=1000.0)[0])) == 30
    assert len(set(generate(loop, [prompt], max_tokens=30, presence_penalty=1000.0)[0])) == 30
    fresh = generate(loop, [prompt], max_tokens=10, repetition_penalty=1e6)[0]
    assert not set(fresh) & set(prompt)


def test_parameters_that_allow_no_token_fail_only_that_request(folder):
    everything = tuple((token,) for token in range(VOCABULARY))
    prompt = some_prompts(1)[0]
    loop = engine(folder)
    answers = run_all(
        loop,
        [
            GenerateRequest(1, prompt, SamplingParams(max_tokens=5, bad_words=everything)),
            GenerateRequest(2, prompt, SamplingParams(max_tokens=5)),
        ],
    )
    assert answers.reasons == {1: "error", 2: "length"}
    assert "no token" in answers.errors[1]
    assert answers[2] == generate(engine(folder), [prompt], max_tokens=5)[0]


def test_random_arrivals_and_cancels_release_every_row_and_block(folder):
    import random

    chance = random.Random(3)
    loop = engine(folder, cache_tokens=2048, policy="max_utilization", block_tokens=8)
    live: list[int] = []
    for request_id in range(2000):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 60))]
        loop.submit(
            GenerateRequest(request_id, prompt, SamplingParams(max_tokens=chance.randrange(1, 30)))
        )
        live.append(request_id)
        while len(live) > 8:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.2:
            loop.step()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.check_integrity()
    stats = loop.stats()
    assert (stats.free_blocks, stats.finished) == (stats.total_blocks, 2000)


def test_more_than_64_requests_run_at_once_with_the_answers_that_each_gives_alone(folder):
    prompts = some_prompts(24) * 4
    loop = engine(folder, cache_tokens=16384)
    assert loop.info.max_rows == 128  # 128 tokens of cache for each
    plans = record_plans(loop)
    together = generate(loop, prompts, max_tokens=24)
    assert max(len(plan.rows) for plan in plans) == 96
    assert together[:24] == generate(engine(folder, max_rows=1), prompts[:24], max_tokens=24)
    assert together[24:] == together[:24] * 3
