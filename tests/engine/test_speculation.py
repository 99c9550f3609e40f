"""Draft tokens change only the number of steps of a real engine, not the tokens."""

import math

import pytest
import torch
from run_engine import engine, run_all
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("speculation")
    random_model(config_of("llama", max_position_embeddings=256)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    phrase = torch.randint(0, VOCABULARY, (12,), generator=generator).tolist()
    return [
        phrase * 3,
        phrase * 2 + [5, 6],
        torch.randint(0, VOCABULARY, (40,), generator=generator).tolist(),
    ]


WAYS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.05, seed=9),
    SamplingParams(
        max_tokens=40,
        temperature=0.05,
        seed=4,
        top_k=5,
        repetition_penalty=1.1,
        log_probs=True,
        top_log_probs=2,
    ),
    SamplingParams(max_tokens=40, temperature=2.0, seed=4, frequency_penalty=0.3),
    SamplingParams(
        max_tokens=40, bad_words=((7,), (3, 4)), min_tokens=20, end_ids=(11, 12, 13, 14, 15)
    ),
]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"step_tokens": 7, "block_tokens": 4},
        {"policy": "max_utilization", "cache_tokens": 320, "block_tokens": 8},
    ],
)
def test_text_is_the_same_with_and_without_draft_tokens(folder, more):
    requests = [
        GenerateRequest(len(WAYS) * p + w, prompt, way)
        for p, prompt in enumerate(prompts())
        for w, way in enumerate(WAYS)
    ]
    plain = run_all(engine(folder), requests)
    loop = engine(folder, lookup_tokens=4, **more)
    drafted = run_all(loop, requests)
    assert drafted == plain
    assert drafted.reasons == plain.reasons
    stats = loop.stats()
    assert stats.accepted_draft_tokens > 0
    assert stats.draft_tokens > stats.accepted_draft_tokens
    for request in requests:
        if request.sampling.log_probs:
            found, expected = (a.log_probs[request.request_id] for a in (drafted, plain))
            assert all(
                math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, expected, strict=True)
            )
            tops = [
                [token for token, _ in top] for top in drafted.top_log_probs[request.request_id]
            ]
            assert tops == [
                [token for token, _ in top] for top in plain.top_log_probs[request.request_id]
            ]


def test_given_draft_tokens_are_verified_in_one_step(folder):
    prompt = prompts()[2]
    answer = run_all(engine(folder), [GenerateRequest(1, prompt, SamplingParams(max_tokens=12))])[1]
    steps = {}
    half = answer[:5] + [(answer[5] + 1) % VOCABULARY] * 5
    for name, draft in {"none": [], "right": answer[:10], "half": half}.items():
        loop = engine(folder)
        found = run_all(
            loop, [GenerateRequest(1, prompt, SamplingParams(max_tokens=12), draft=draft)]
        )
        assert found[1] == answer
        steps[name] = loop.stats().steps
        assert loop.stats().accepted_draft_tokens == {"none": 0, "right": 10, "half": 5}[name]
    assert steps["right"] < steps["half"] < steps["none"]


def test_sampled_tokens_are_the_same_with_and_without_draft_tokens(folder):
    """For every seed, after accepted draft tokens and after rejected ones."""
    prompt, draws = prompts()[2], 400
    plain = [
        GenerateRequest(s, prompt, SamplingParams(max_tokens=2, temperature=1.0, seed=s))
        for s in range(draws)
    ]
    expected = run_all(engine(folder), plain)
    drafting = [
        GenerateRequest(r.request_id, prompt, r.sampling, draft=[expected[0][0]]) for r in plain
    ]
    loop = engine(folder)
    assert run_all(loop, drafting) == expected
    assert 0 < loop.stats().accepted_draft_tokens < draws


def test_a_draft_token_outside_the_vocabulary_is_refused(folder):
    found = run_all(
        engine(folder), [GenerateRequest(1, [1], SamplingParams(max_tokens=3), draft=[VOCABULARY])]
    )
    assert f"token id {VOCABULARY} is outside the vocabulary" in found.errors[1]
