"""Outputs that a constraint revises: tokens it replaces and appends, on plain Python objects."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import (
    END,
    Harness,
    Revising,
    expected_answer,
    expected_revised_answer,
    log_prob,
    make_scheduler,
)

from slipstream.engine.cache.window import Window
from slipstream.engine.request import GenerateRequest, Revision
from slipstream.engine.sampling_params import SamplingParams

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 30), st.booleans(), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    min_size=5,
    max_size=60,
)


def add(
    harness: Harness,
    request_id: int,
    prompt: list[int],
    most: int,
    revised: bool,
    scored: bool = False,
) -> None:
    sampling = SamplingParams(max_tokens=most, end_ids=(END,), log_probs=scored)
    harness.scheduler.add(
        GenerateRequest(request_id, prompt, sampling), Revising() if revised else None
    )


def expected(prompt: list[int], most: int, revised: bool, scored: bool) -> tuple[list[int], str]:
    if revised:
        return expected_revised_answer(prompt, most)
    answer = expected_answer(prompt, most)
    return answer, "length" if len(answer) == most else "stop"


def check_log_probs(harness: Harness, request_id: int, prompt: list[int]) -> None:
    """Check that each token has the log-probability that follows from the final tokens before it."""
    sent = harness.answers[request_id]
    scores = [log_prob(prompt + sent[:place], token) for place, token in enumerate(sent)]
    assert harness.log_probs[request_id] == scores


@settings(max_examples=250, deadline=None)
@given(
    events,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(17, 30),
    st.sampled_from([None, Window(7), Window(9, 5)]),
    st.sampled_from([0, 8]),
    st.sampled_from([0, 2]),
)
def test_any_traffic_gives_the_revised_tokens_and_releases_every_block(
    story, policy, reuse, chunked, depth, blocks, window, host_slots, threads
):
    scheduler = make_scheduler(
        blocks=blocks,
        policy=policy,
        reuse=reuse,
        chunked=chunked,
        window=window,
        host_slots=host_slots if reuse and window is None else 0,
        revision_threads=threads,
    )
    harness = Harness(scheduler, depth)
    submitted: dict[int, tuple[list[int], int, bool, bool]] = {}
    cancelled = set()
    for event in story:
        if event[0] == "add":
            submitted[len(submitted)] = event[1:]
            add(harness, len(submitted) - 1, *event[1:])
        elif event[0] == "cancel":
            if event[1] in submitted and event[1] not in harness.reasons:
                cancelled.add(event[1])
                scheduler.cancel(event[1])
        else:
            for _ in range(event[1]):
                harness.step()
    harness.run_dry()
    assert set(harness.reasons) == set(submitted)
    for request_id, request in submitted.items():
        answer, reason = expected(*request)
        sent = harness.answers[request_id]
        if request[3]:
            check_log_probs(harness, request_id, request[0])
        if request_id in cancelled:
            # all that was sampled is sent, although its last tokens might have been revised
            assert harness.reasons[request_id] == "cancelled"
            assert sent[:-3] == answer[: max(0, len(sent) - 3)]
        else:
            assert sent == answer
            assert harness.reasons[request_id] == reason
    stats = scheduler.stats()
    assert stats.free_blocks == blocks
    assert (stats.running, stats.waiting) == (0, 0)


class Appending(Revising):
    def revise(self, tokens, fixed):
        return Revision([*tokens, 11, 12, 13], len(tokens))


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("depth", "threads"), [(1, 0), (2, 0), (2, 1)])
def test_appended_tokens_cost_no_step(depth, threads, scored):
    harness = Harness(make_scheduler(revision_threads=threads), depth)
    sampling = SamplingParams(max_tokens=24, log_probs=scored)
    harness.scheduler.add(GenerateRequest(1, [1, 2, 0], sampling), Appending())
    harness.run_dry()
    assert len(harness.answers[1]) == 24
    assert harness.answers[1][1:4] == harness.answers[1][-3:] == [11, 12, 13]
    assert harness.device.steps == 6 + scored  # the scores of the last tokens take a step
    assert harness.scheduler.stats().output_tokens == 24


@pytest.mark.parametrize("prompt", [[1, 2, 0], [2], [3, 3, 1, 0, 2], [0] * 9])
def test_blocks_of_revised_outputs_are_reused_with_their_final_tokens(prompt):
    harness = Harness(make_scheduler(blocks=40), depth=2)
    add(harness, 1, prompt, 20, revised=True)
    harness.run_dry()
    longer = prompt + harness.answers[1]
    add(harness, 2, longer, 5, revised=False)
    harness.run_dry()  # the fake device checks that each cached slot has the right tokens
    assert harness.answers[2] == expected_answer(longer, 5)
    # tokens that were appended at the end are not computed
    assert harness.scheduler.stats().cached_prompt_tokens >= (len(longer) - 12) // 4 * 4


def test_free_requests_do_not_wait_for_revisions():
    released = threading.Event()

    class Slow(Revising):
        def revise(self, tokens, fixed):
            assert released.wait(60)
            return super().revise(tokens, fixed)

    harness = Harness(make_scheduler(revision_threads=1), depth=2)
    sampling = SamplingParams(max_tokens=20, end_ids=(END,))
    harness.scheduler.add(GenerateRequest(1, [1, 2, 0], sampling), Slow())
    add(harness, 2, [2], 12, revised=False)
    while 2 not in harness.reasons:
        harness.step()
    assert harness.answers[2] == expected_answer([2], 12)
    assert 1 not in harness.reasons
    released.set()
    harness.run_dry()
    assert (harness.answers[1], harness.reasons[1]) == expected_revised_answer([1, 2, 0], 20)


def test_tokens_are_sent_once_they_cannot_be_revised():
    harness = Harness(make_scheduler(), depth=1)
    add(harness, 1, [1, 2, 0], 30, revised=True)
    answer, _ = expected_revised_answer([1, 2, 0], 30)
    while 1 not in harness.reasons:
        harness.step()
        sent = harness.answers.get(1, [])
        assert sent == answer[: len(sent)]
    assert harness.answers[1] == answer


@pytest.mark.parametrize(
    "more",
    [
        {"no_repeat_ngram": 2},
        {"bad_words": ((7, 8),)},
        {"logit_bias": ((3, -1.0),)},
    ],
)
def test_outputs_are_not_revised_where_single_tokens_matter(more):
    harness = Harness(make_scheduler(), depth=1)
    sampling = SamplingParams(max_tokens=20, end_ids=(END,), **more)
    harness.scheduler.add(GenerateRequest(1, [1, 2, 0], sampling), Revising())
    harness.run_dry()
    # the constraint ends an output at a token that the plain answer lacks
    assert harness.answers[1] == expected_answer([1, 2, 0], 20)
