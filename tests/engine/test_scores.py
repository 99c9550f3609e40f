"""Logits and log-probabilities of prompt and output, however they are computed."""

import math

import numpy as np
import pytest
import torch
from run_engine import all_logits, engine
from run_outputs import ALL, matrix, run
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.messages import Scores
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("scores")
    random_model(config_of("llama", max_position_embeddings=256)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


def some_prompts(count: int, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (length + i,), generator=generator).tolist()
        for i in range(count)
    ]


WAYS = {
    "one step": {},
    "in steps of 7 tokens": {"step_tokens": 7},
    "a warm cache": {"block_tokens": 8},
    "preempted": {
        "policy": "max_utilization",
        "cache_tokens": 224,
        "block_tokens": 16,
        "max_rows": 8,
        "step_tokens": 24,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_and_prompt_log_probs_equal_one_pass_over_the_whole_sequence(folder, way):
    loop, prompts = engine(folder, **WAYS[way]), some_prompts(6)
    if way == "a warm cache":
        run(loop, [GenerateRequest(99, prompts[0], SamplingParams(max_tokens=4))])
    asked = SamplingParams(max_tokens=20, temperature=0.9, seed=5, repetition_penalty=1.3, **ALL)
    plain = SamplingParams(max_tokens=20)
    outputs = run(
        loop,
        [
            GenerateRequest(i, prompt, plain if i % 3 == 2 else asked)
            for i, prompt in enumerate(prompts)
        ],
    )
    if way == "preempted":
        assert loop.stats().preemptions > 0
    assert set(outputs.scores) == {0, 1, 3, 4}
    for index in outputs.scores:
        prompt, answer, scores = prompts[index], outputs.tokens[index], outputs.scores[index]
        expected = all_logits(folder, torch.float32, [prompt + answer])[0]
        torch.testing.assert_close(
            matrix(scores.context_logits), expected[: len(prompt)], atol=1e-3, rtol=1e-3
        )
        generated = matrix(scores.generation_logits)
        torch.testing.assert_close(generated, expected[len(prompt) - 1 : -1], atol=1e-3, rtol=1e-3)
        log_probs = expected.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        assert np.allclose(scores.prompt_log_probs, log_probs, atol=1e-3)
        check_likeliest(scores, expected[: len(prompt) - 1].log_softmax(-1), log_probs)


def test_a_step_has_scores_of_a_part_of_a_long_prompt_only(folder):
    """A step with all logits of a long prompt would delay all other requests."""
    loop = engine(folder)
    counts = []
    launch = loop.runner.launch
    loop.runner.launch = lambda plan: (counts.append(max(plan.counts)), launch(plan))[1]
    (prompt,) = some_prompts(1, 200)
    outputs = run(loop, [GenerateRequest(0, prompt, SamplingParams(max_tokens=2, **ALL))])
    assert counts[:4] == [64, 64, 64, 8]
    assert len(outputs.scores[0].prompt_log_probs) == 199


def check_likeliest(scores: Scores, all_log_probs: torch.Tensor, chosen: torch.Tensor) -> None:
    """Check the likeliest tokens and the ranks of a prompt, [positions, vocab] and [positions]."""
    values, ids = all_log_probs.topk(3)
    found = scores.top_prompt_log_probs
    assert np.allclose([[value for _, value in top] for top in found], values, atol=1e-3)
    gaps = values[:, :-1] - values[:, 1:] > 1e-3  # closer ones may change places
    first = [top[0][0] for top in found]
    assert all(
        a == b for a, b, far in zip(first, ids[:, 0].tolist(), gaps[:, 0], strict=True) if far
    )
    ranks = (all_log_probs >= chosen[:, None]).sum(-1)
    assert np.mean(np.array(scores.prompt_ranks) == ranks.numpy()) > 0.9
    assert np.abs(np.array(scores.prompt_ranks) - ranks.numpy()).max() <= 2


def test_the_end_token_is_in_the_output_where_it_is_included(folder):
    prompt = some_prompts(1)[0]
    free = run(engine(folder), [GenerateRequest(1, prompt, SamplingParams(max_tokens=8))]).tokens[1]
    ends = (free[3],)
    place = free.index(free[3])
    for sampling, tokens in (
        (SamplingParams(max_tokens=8, end_ids=ends), free[:place]),
        (SamplingParams(max_tokens=8, end_ids=ends, include_end=True), free[: place + 1]),
        (SamplingParams(max_tokens=place + 1, end_ids=ends, include_end=True), free[: place + 1]),
    ):
        for lookup in ({}, {"lookup_tokens": 4}):
            found = run(engine(folder, **lookup), [GenerateRequest(1, prompt, sampling)])
            assert found.tokens[1] == tokens
            assert found.reasons[1] == "stop"


def test_only_allowed_tokens_are_sampled(folder):
    prompt = some_prompts(1)[0]
    allowed = (3, 11, 40, 41)
    for sampling in (
        SamplingParams(max_tokens=30, allowed_tokens=allowed),
        SamplingParams(max_tokens=30, allowed_tokens=allowed, temperature=2.0, seed=1, top_p=0.9),
        SamplingParams(
            max_tokens=30, allowed_tokens=allowed, repetition_penalty=1.5, logit_bias=((5, 100.0),)
        ),
    ):
        tokens = run(engine(folder), [GenerateRequest(1, prompt, sampling)]).tokens[1]
        assert set(tokens) <= set(allowed)
        assert len(tokens) == 30
    logits = all_logits(folder, torch.float32, [prompt])[0][-1]
    best = allowed[logits[list(allowed)].argmax()]
    greedy = SamplingParams(max_tokens=1, allowed_tokens=allowed)
    assert run(engine(folder), [GenerateRequest(1, prompt, greedy)]).tokens[1] == [best]


def test_scores_change_no_token(folder):
    prompts = some_prompts(4)
    sampling = {"max_tokens": 16, "temperature": 0.7, "seed": 9}
    alone = [
        run(engine(folder), [GenerateRequest(0, p, SamplingParams(**sampling))]).tokens[0]
        for p in prompts
    ]
    mixed = [SamplingParams(**sampling, **(ALL if index % 2 else {})) for index in range(4)]
    outputs = run(engine(folder), [GenerateRequest(i, p, mixed[i]) for i, p in enumerate(prompts)])
    assert [outputs.tokens[i] for i in range(4)] == alone


def test_a_prompt_of_one_token_has_logits_and_no_log_probs(folder):
    outputs = run(engine(folder), [GenerateRequest(1, [5], SamplingParams(max_tokens=1, **ALL))])
    assert matrix(outputs.scores[1].context_logits).shape == (1, VOCABULARY)
    assert outputs.scores[1].prompt_log_probs == []


def test_timings_are_sent_at_the_end_with_block_counts(folder):
    loop, prompt = engine(folder, block_tokens=8), some_prompts(1)[0]
    first = run(
        loop, [GenerateRequest(1, prompt, SamplingParams(max_tokens=9, timing=True))]
    ).timings[1]
    again = run(
        loop,
        [
            GenerateRequest(2, prompt, SamplingParams(max_tokens=9, timing=True)),
            GenerateRequest(3, prompt, SamplingParams(max_tokens=9)),
        ],
    )
    assert set(again.timings) == {2}
    for timing in (first, again.timings[2]):
        assert (
            0
            < timing.arrived_ns
            <= timing.first_scheduled_ns
            <= timing.first_token_ns
            < timing.last_token_ns
        )
    assert (first.allocated_blocks, first.reused_blocks) == (6, 0)
    assert (again.timings[2].allocated_blocks, again.timings[2].reused_blocks) == (2, 4)


# --- parameters ---


def test_no_repeat_ngram_prevents_repetitions(folder):
    prompt = some_prompts(1)[0]
    for size in (1, 2, 3):
        outputs = run(
            engine(folder),
            [GenerateRequest(1, prompt, SamplingParams(max_tokens=50, no_repeat_ngram=size))],
        )
        tokens = prompt + outputs.tokens[1]
        runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        new = runs[len(prompt) - size + 1 :]
        assert len(new) == 50
        assert not any(run in runs[: len(prompt) - size + 1 + i] for i, run in enumerate(new))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_repeat_ngram_bans_the_tokens_that_transformers_bans(folder, size):
    from transformers import NoRepeatNGramLogitsProcessor

    from slipstream.engine.sampler import repeats

    generator = torch.Generator().manual_seed(size)
    for length in range(1, 30):
        tokens = torch.randint(0, 4, (length,), generator=generator)
        banned = torch.zeros(1, 4)
        last, seen = repeats(tokens.numpy(), size)
        banned[0, last[seen]] = -math.inf
        assert torch.equal(
            banned, NoRepeatNGramLogitsProcessor(size)(tokens[None], torch.zeros(1, 4))
        )


def decayed(first: float, decay: float, least: float, reset: int, answer: list[int]) -> float:
    """Return top_p after each token: it decays down to the minimum, or resets."""
    value = first
    for token in answer:
        value = first if token == reset else max(value * decay, least)
    return value


def test_top_p_decays_and_resets():
    from slipstream.engine.sampler import decayed_top_p

    cases = [(0.9, 0.5, 0.2, 7), (0.1, 0.9, 0.3, -1), (1.0, 0.8, 1e-6, 3), (0.8, 0.9, 0.5, 7)]
    answers = [[1, 2, 7, 4], [5, 5, 5], [3], [7, 1], []]
    for first, decay, least, reset in cases:
        p = SamplingParams(top_p=first, top_p_decay=decay, top_p_min=least, top_p_reset_id=reset)
        for answer in answers:
            expected = decayed(first, decay, least, reset, answer)
            assert decayed_top_p(p, np.array(answer)) == pytest.approx(expected)


def test_a_top_p_near_zero_gives_the_likeliest_token(folder):
    prompt = some_prompts(1)[0]
    shrinking = SamplingParams(max_tokens=12, temperature=1.0, seed=4, top_p=1.0, top_p_decay=1e-6)
    tokens = run(engine(folder), [GenerateRequest(1, prompt, shrinking)]).tokens[1]
    likeliest = (
        all_logits(folder, torch.float32, [prompt + tokens])[0]
        .argmax(-1)[len(prompt) - 1 : -1]
        .tolist()
    )
    assert tokens[1:] == likeliest[1:]
    same = SamplingParams(max_tokens=12, temperature=1.0, seed=4, top_p=1.0)
    assert run(engine(folder), [GenerateRequest(1, prompt, same)]).tokens[1][0] == tokens[0]
