"""Beams, requests with the same prompt and draft tokens, on plain Python objects: which requests
share which blocks.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import (
    END,
    Harness,
    expected_answer,
    expected_beams,
    make_scheduler,
    next_token,
)

from slipstream.engine.cache.window import Window
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.speculation import DraftProposer, count_accepted


def beams(max_tokens: int, width: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, beam_width=width, end_ids=(END,), **more)


def plain(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, end_ids=(END,))


class Traffic:
    """The requests sent to a scheduler, and the outputs that they must have."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.requests: dict[int, GenerateRequest] = {}
        self.cancelled: set[int] = set()

    def add(self, prompt: list[int], sampling: SamplingParams, **more) -> int:
        request = GenerateRequest(len(self.requests), prompt, sampling, **more)
        self.requests[request.request_id] = request
        self.harness.scheduler.add(request)
        return request.request_id

    def cancel(self, request_id: int) -> None:
        if request_id in self.requests and request_id not in self.harness.reasons:
            self.cancelled.add(request_id)
            self.harness.scheduler.cancel(request_id)

    def check(self) -> None:
        harness = self.harness
        assert set(harness.reasons) == set(self.requests)
        for request_id, request in self.requests.items():
            reason = harness.reasons[request_id]
            if reason == "error":  # too large for this scheduler: refused at once
                assert request.sampling.beams
            elif request_id in self.cancelled:
                assert reason == "cancelled"
            elif request.sampling.beams:
                expected = expected_beams(request.prompt, request.sampling)
                assert harness.beams[request_id] == expected
                assert reason == expected[0].finish_reason
            else:
                answer = expected_answer(request.prompt, request.sampling.max_tokens)
                assert harness.answers[request_id] == answer
                assert reason == (
                    "length" if len(answer) == request.sampling.max_tokens else "stop"
                )
        stats = harness.scheduler.stats()
        assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=20)
events = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), prompts, st.integers(1, 20), st.integers(1, 4)),
        st.tuples(st.just("beams"), prompts, st.integers(1, 12), st.integers(2, 4)),
        st.tuples(st.just("draft"), prompts, st.integers(1, 20), st.integers(0, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    min_size=5,
    max_size=40,
)


def draft_of(prompt: list[int], right: int) -> list[int]:
    """Return draft tokens; the first `right` of them are correct."""
    tokens = list(prompt)
    for _ in range(right):
        tokens.append(next_token(tokens))
    return [*tokens[len(prompt) :], 1, 1, 1]


@settings(max_examples=250, deadline=None)
@given(
    events,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(24, 40),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 1, 5, 30]),
    st.sampled_from([None, None, Window(1), Window(6), Window(9, sinks=2), Window(14, sinks=5)]),
)
def test_any_mix_of_beams_samples_and_draft_tokens_gives_the_expected_tokens(
    story, policy, reuse, chunked, depth, blocks, lookup_tokens, host_slots, window
):
    scheduler = make_scheduler(
        blocks=blocks,
        rows=6,
        policy=policy,
        reuse=reuse,
        chunked=chunked,
        lookup_tokens=lookup_tokens,
        host_slots=host_slots,
        window=window,
    )
    harness = Harness(scheduler, depth)
    traffic = Traffic(harness)
    for event in story:
        if event[0] == "sample":
            first = traffic.add(event[1], plain(event[2]))
            for _ in range(event[3] - 1):
                traffic.add(event[1], plain(event[2]), shares_prompt_with=first)
        elif event[0] == "beams":
            traffic.add(event[1], beams(event[2], event[3], early_stopping=event[2] % 3))
        elif event[0] == "draft":
            traffic.add(event[1], plain(event[2]), draft=draft_of(event[1], event[3]))
        elif event[0] == "cancel":
            traffic.cancel(event[1])
        else:
            for _ in range(event[1]):
                harness.step()
    harness.run_dry()
    traffic.check()
    assert policy == "max_utilization" or scheduler.stats().preemptions == 0


def storm(cancels: int, seed: int) -> None:
    chance = random.Random(seed)
    harness = Harness(
        make_scheduler(blocks=60, rows=8, policy="max_utilization", lookup_tokens=2, host_slots=9),
        depth=2,
    )
    traffic = Traffic(harness)
    while len(traffic.cancelled) < cancels:
        prompt = [chance.randrange(4) for _ in range(chance.randrange(1, 24))]
        kind, length = chance.randrange(3), chance.randrange(1, 20)
        if kind == 0:
            traffic.add(prompt, beams(length, chance.randrange(2, 5)))
        elif kind == 1:
            first = traffic.add(prompt, plain(length))
            traffic.add(prompt, plain(length), shares_prompt_with=first)
        else:
            traffic.add(prompt, plain(length), draft=draft_of(prompt, 2))
        for _ in range(chance.randrange(3)):
            harness.step()
        live = [
            number
            for number in range(max(0, len(traffic.requests) - 60), len(traffic.requests))
            if number not in harness.reasons and number not in traffic.cancelled
        ]
        for number in chance.sample(live, max(0, len(live) - 10)):
            traffic.cancel(number)
    harness.run_dry()
    traffic.check()


def test_1000_random_cancels_release_every_row_and_block():
    storm(1000, seed=1)


@pytest.mark.slow
def test_10000_random_cancels_release_every_row_and_block():
    storm(10_000, seed=2)


@pytest.mark.parametrize("seed", range(12))
def test_a_failed_plan_fails_one_request_and_changes_no_other(seed):
    """The device has applied the plan and computed no token, as when its memory runs out."""
    chance = random.Random(seed)
    harness = Harness(make_scheduler(blocks=60, rows=8, lookup_tokens=2, host_slots=9), depth=1)
    traffic = Traffic(harness)
    for _ in range(8):
        prompt = [chance.randrange(4) for _ in range(chance.randrange(1, 24))]
        traffic.add(prompt, beams(10, 3) if chance.random() < 0.5 else plain(15))
    for _ in range(chance.randrange(1, 12)):
        harness.step()
    plan = harness.scheduler.plan()
    assert plan is not None
    harness.device.apply(plan)
    harness.scheduler.abandon(plan, "out of memory")
    harness.run_dry()
    failed = [number for number, reason in harness.reasons.items() if reason == "error"]
    assert len(failed) == 1
    del traffic.requests[failed[0]], harness.reasons[failed[0]]
    traffic.check()


def test_a_fork_copies_at_most_one_block_per_beam():
    harness = Harness(make_scheduler(blocks=40, rows=4), depth=1)
    traffic = Traffic(harness)
    traffic.add([1] * 18, beams(2, 4))  # four full blocks and two tokens
    harness.step()
    harness.step()
    plan = harness.scheduler.plan()
    assert plan is not None
    assert len(plan.copies) == 3
    tables = [start.blocks for start in plan.starts]
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert len({table[4] for table in tables}) == 3
    harness.flight.append((plan, harness.device.run(plan)))
    harness.run_dry()
    traffic.check()


def test_samples_of_one_prompt_compute_it_once_even_without_a_cache():
    harness = Harness(make_scheduler(blocks=40, rows=4, reuse=False), depth=1)
    traffic = Traffic(harness)
    prompt = [1, 2] * 7  # three full blocks and two tokens
    first = traffic.add(prompt, plain(8))
    for _ in range(3):
        traffic.add(prompt, plain(8), shares_prompt_with=first)
    computed = 0
    while harness.scheduler.has_work():
        plan = harness.scheduler.plan()
        if plan is not None:
            computed += sum(
                count
                for position, count in zip(plan.positions, plan.counts, strict=True)
                if position < len(prompt)
            )
            harness.scheduler.commit(plan, harness.device.run(plan))
        harness.collect()
        harness.scheduler.check_integrity()
    traffic.check()
    assert computed == len(prompt) + 3  # each of the others computes the last token for itself
    assert harness.device.copied == 3


def test_evicted_blocks_are_restored_from_host_memory():
    harness = Harness(make_scheduler(blocks=16, rows=1, host_slots=20), depth=1)
    traffic = Traffic(harness)
    # nine blocks each: the second evicts the first
    long = [[first, *range(4, 39)] for first in (1, 2)]
    for prompt in (*long, long[0]):
        traffic.add(prompt, plain(4))
        harness.run_dry()
    traffic.check()
    assert harness.device.loaded > 0
    # all but the last block: one token is always computed
    assert harness.scheduler.stats().cached_prompt_tokens == 32


def test_a_prompt_is_shared_only_by_the_same_tenant_and_adapter():
    for other in ({"cache_salt": "b"}, {"adapter": 1}):
        harness = Harness(make_scheduler(blocks=40, rows=4), depth=1)
        traffic = Traffic(harness)
        first = traffic.add([1] * 9, plain(4))
        traffic.add([1] * 9, plain(4), shares_prompt_with=first, **other)
        harness.run_dry()
        traffic.check()
        assert harness.device.copied == 0
        assert harness.scheduler.stats().cached_prompt_tokens == 0


def test_accepted_draft_tokens_save_steps_and_rejected_ones_change_nothing():
    steps = {}
    for right in (0, 5):
        harness = Harness(make_scheduler(blocks=40), depth=1)
        traffic = Traffic(harness)
        traffic.add([2, 2, 1], plain(12), draft=draft_of([2, 2, 1], right))
        harness.run_dry()
        traffic.check()
        stats = harness.scheduler.stats()
        steps[right] = stats.steps
        assert stats.draft_tokens == right + 3
        assert stats.accepted_draft_tokens == right
    assert steps[5] == steps[0] - 5


def test_prompt_lookup_proposes_the_continuation_of_an_earlier_match():
    proposer = DraftProposer(lookup_tokens=3)
    assert proposer.propose([5, 6, 7, 8, 9, 5, 6], 7, most=10) == [7, 8, 9]
    assert proposer.propose([5, 6, 7, 8, 9, 5, 6, 7], 7, most=2) == [8, 9]
    assert proposer.propose([5, 6, 7, 8, 9, 5, 6, 7, 44], 7, most=2) == []
    assert DraftProposer(lookup_tokens=0).propose([1, 1, 1], 3, most=5) == []


def test_number_of_draft_tokens_follows_their_acceptance():
    proposer = DraftProposer(lookup_tokens=4)
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    assert proposer.propose(text, 0, most=9) == [8, 9, 1, 2]
    proposer.learn(4, 1)
    assert proposer.propose(text, 0, most=9) == [8, 9]
    proposer.learn(2, 0)
    assert proposer.propose(text, 0, most=9) == [8]
    assert proposer.propose([*text, 2], 0, most=9) == [], (
        "one token that agrees is no longer enough"
    )
    proposer.learn(1, 1)
    assert proposer.propose([*text, 2], 0, most=9) == [5, 6]


def test_given_draft_tokens_are_proposed_while_they_match():
    proposer = DraftProposer([4, 5, 6])
    assert proposer.propose([1, 2], 2, most=2) == [4, 5]
    assert proposer.propose([1, 2, 4], 2, most=5) == [5, 6]
    assert proposer.propose([1, 2, 9], 2, most=5) == []
    assert count_accepted([4, 5, 7], [4, 5]) == 3
    assert count_accepted([4, 9, 7], [4, 5]) == 2
    assert count_accepted([3], []) == 1


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (3, "Requested beam width 3 is larger than configured max beam width 2"),
        (0, "beam width must be at least 1"),
    ],
)
def test_a_beam_width_over_the_maximum_is_refused(width, words):
    scheduler = make_scheduler(max_beam_width=2)
    scheduler.add(GenerateRequest(1, [1], SamplingParams(beam_width=width)))
    outputs = scheduler.take_outputs()
    assert outputs is not None
    assert words in outputs.errors[1]


def test_beams_that_exceed_the_cache_are_refused():
    scheduler = make_scheduler(blocks=20)
    # 2 + 2 × 10 blocks
    scheduler.add(GenerateRequest(1, [1] * 8, SamplingParams(max_tokens=40, beam_width=2)))
    outputs = scheduler.take_outputs()
    assert outputs is not None
    assert "of 2 beams exceed the KV cache" in outputs.errors[1]


def test_a_cancelled_beam_search_sends_its_current_beams():
    harness = Harness(make_scheduler(blocks=40), depth=1)
    harness.scheduler.add(GenerateRequest(1, [1, 2], beams(30, 2)))
    for _ in range(4):
        harness.step()
    harness.scheduler.cancel(1, "timeout")
    harness.run_dry()
    assert harness.reasons == {1: "timeout"}
    assert len(harness.beams[1]) == 2
    assert all(beam.tokens for beam in harness.beams[1])
