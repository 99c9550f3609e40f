"""Draft tokens of streams that run alone on a CPU: when they are proposed, and what they cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_engine import engine, run_all
from scheduler_harness import (
    END,
    VOCABULARY,
    Harness,
    expected_answer,
    make_scheduler,
    next_token,
)
from tiny_models import config_of, random_model

from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.speculation import AdaptiveLookup, DraftCosts, Speculation
from slipstream.weights.build import build_engine

TEXT = [5, 6, 7, 4, 8, 9, 1, 2, 3, 5, 6, 7, 4]  # what followed 5, 6, 7, 4 was 8, 9, 1, ...


def lookup(scale: float = 1.0) -> AdaptiveLookup:
    """Return a proposer where draft tokens cost this many times what is assumed."""
    costs = DraftCosts()
    costs.scale = scale
    return AdaptiveLookup(costs)


def test_the_continuation_of_the_last_four_tokens_is_proposed():
    assert lookup().propose(TEXT, 5, most=9) == [8, 9, 1, 2]
    assert lookup().propose(TEXT, 5, most=1) == [8]
    assert lookup().propose(TEXT, 5, most=0) == []
    assert lookup().propose([*TEXT, 44], 5, most=9) == []
    assert lookup().propose([5, 6], 0, most=9) == []


def test_a_text_that_repeats_itself_is_continued_beyond_its_end():
    assert lookup().propose([1, 2, 1, 2, 1, 2], 0, most=9) == [1, 2, 1, 2]
    assert lookup().propose([1, 2, 1, 2, 1, 2, 1], 0, most=3) == [2, 1, 2]


def test_accepted_draft_tokens_lead_to_more_of_them():
    proposer = lookup()
    text = [*range(20, 40), 20, 21, 22, 23]
    assert proposer.propose(text, 20, most=9) == [24, 25, 26, 27]
    proposer.learn(4, 4)
    assert len(proposer.propose(text, 20, most=9)) == 7
    proposer.learn(7, 2)
    assert len(proposer.propose(text, 20, most=9)) == 3


def test_after_rejected_draft_tokens_the_stream_waits_longer_each_time():
    proposer = lookup(scale=0.0)  # the share of the time sets no limit
    text = [1, 2, 3, 1, 2, 3, 1]
    tried = []
    for number in range(200):
        if found := proposer.propose(text, 0, most=9):
            assert len(found) == 4
            tried.append(number)
            proposer.learn(4, 0)
        text.append(2 + number % 3 if number % 3 < 2 else 1)
    assert tried == [0, 5, 14, 31, 64, 129, 194]
    text += [2 + number % 3 if number % 3 < 2 else 1 for number in range(200, 300)]
    assert len(proposer.propose(text, 0, most=9)) == 4
    proposer.learn(4, 1)
    assert len(proposer.propose(text, 0, most=9)) == 2
    proposer.learn(2, 0)
    known = len(text)
    while not proposer.propose(text, 0, most=9):
        text.append(2 + len(text) % 3 if len(text) % 3 < 2 else 1)
        assert len(text) < known + 60
    assert known + 5 <= len(text)  # the first wait again


def test_draft_tokens_that_cost_much_are_not_proposed_before_there_is_output():
    assert lookup(scale=1.5).propose(TEXT, len(TEXT), most=9) == []
    assert len(lookup(scale=1.5).propose([0] * 50 + TEXT, 10, most=9)) == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=60, max_size=200), st.floats(0.1, 4.0))
def test_rejected_draft_tokens_cost_no_more_than_their_share(accepts, scale):
    """Whatever is accepted, the steps take little longer than as many steps as tokens."""
    proposer = lookup(scale)
    text = [1, 2, 3]
    steps = 0.0
    for accept in accepts:
        found = proposer.propose(text, 3, most=7)
        accepted = min(accept, len(found))
        if found:
            proposer.learn(len(found), accepted)
            steps += scale * (0.3 + 0.1 * len(found))
        text += [1 + (len(text) + i) % 3 for i in range(1 + accepted)]
        steps += 1
    assert steps <= 1.01 * (len(text) - 3) + 0.8 + 1e-6


def plan_of(step: int, drafts: int, rows: int = 1) -> StepPlan:
    plan = StepPlan(step)
    plan.rows = list(range(rows))
    plan.counts = [1 + drafts] * rows
    plan.samples = [True] * rows
    plan.drafts = [drafts] * rows
    return plan


def run_steps(costs: DraftCosts, steps: list[tuple[int, float]], rows: int = 1) -> None:
    """Run steps of these draft tokens and seconds."""
    now = 0.0
    for step, (drafts, seconds) in enumerate(steps):
        plan = plan_of(step, drafts, rows)
        costs.begin(plan, now)
        now += seconds
        costs.end(plan, now)


def test_the_cost_of_draft_tokens_is_measured_beside_steps_without_them():
    costs = DraftCosts()
    run_steps(costs, [(0, 0.010), (0, 0.011), (0, 0.010), *[(4, 0.014)] * 40])
    assert costs.of(4) == pytest.approx(0.4, rel=0.01)
    run_steps(costs, [(4, 9.0)])  # something else delayed the step
    assert 0.5 < costs.of(4) < 1.5


def test_steps_of_several_rows_are_not_measured():
    costs = DraftCosts()
    run_steps(costs, [(0, 0.010)] * 3 + [(4, 0.05)] * 9, rows=2)
    assert costs.scale == 1.0


def prompt_with_a_match() -> list[int]:
    """Return a prompt whose last three tokens and first sampled one occur in it."""
    for other in range(VOCABULARY):
        for token in range(4, VOCABULARY):
            prompt = [9, 4, 2, token, other, 9, 4, 2]
            if next_token(prompt) == token:
                return prompt
    raise AssertionError("the fake model has no such prompt")


@pytest.mark.parametrize(("requests", "steps_with_drafts"), [(1, True), (2, False)])
def test_only_a_stream_that_runs_alone_has_draft_tokens(requests, steps_with_drafts):
    prompt = prompt_with_a_match()
    scheduler = make_scheduler(blocks=60, speculation=Speculation(adaptive=True))
    harness = Harness(scheduler, depth=1)
    for request_id in range(requests):
        sampling = SamplingParams(max_tokens=6, end_ids=(END,))
        scheduler.add(GenerateRequest(request_id, prompt, sampling))
    harness.run_dry()
    for request_id in range(requests):
        assert harness.answers[request_id] == expected_answer(prompt, 6)
    assert (scheduler.stats().draft_tokens > 0) is steps_with_drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("adaptive")
    random_model(config_of("llama", max_position_embeddings=512)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


WAYS = (
    SamplingParams(max_tokens=120),
    SamplingParams(max_tokens=120, temperature=0.05, seed=9),
    SamplingParams(max_tokens=60, temperature=0.05, seed=4, repetition_penalty=1.1, log_probs=True),
    SamplingParams(max_tokens=60, temperature=2.0, seed=4),
)


def alone(loop, requests):
    """Run requests one after the other."""
    return [run_all(loop, [request])[request.request_id] for request in requests]


def test_float32_texts_are_the_same_with_and_without_adaptive_lookup(folder):
    phrase = [(7 * place) % VOCABULARY for place in range(12)]
    requests = [
        GenerateRequest(10 * number + way, prompt, sampling)
        for number, prompt in enumerate((phrase * 3, phrase * 2 + [5, 6], list(range(40))))
        for way, sampling in enumerate(WAYS)
    ]
    plain = engine(folder)
    expected = alone(plain, requests)
    assert plain.stats().draft_tokens == 0
    loop = engine(folder, adaptive_lookup=True)
    assert alone(loop, requests) == expected
    stats = loop.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.steps < plain.stats().steps
    together = run_all(loop, requests)
    assert [together[request.request_id] for request in requests] == expected
