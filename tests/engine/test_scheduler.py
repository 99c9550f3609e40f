"""Properties of the scheduler and the block pool, on plain Python objects without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import END, Harness, SmallSpread, expected_answer, make_scheduler, next_token

from slipstream.engine.blocks import NULL_BLOCK, BlockPool, hash_block, root_hash
from slipstream.engine.cache.window import Window
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.step_budget import PromptLimits, StepBudget

prompts = st.lists(
    st.integers(0, 3), min_size=1, max_size=30
)  # few values: prefixes are often equal
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 30), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(
    events,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(17, 30),
    st.sampled_from([None, 0.05]),
    st.sampled_from([None, SmallSpread()]),
)
def test_any_traffic_gives_the_expected_tokens_and_releases_every_block(
    story, policy, reuse, chunked, depth, blocks, target, spread
):
    scheduler = make_scheduler(
        blocks=blocks,
        policy=policy,
        reuse=reuse,
        chunked=chunked,
        prompt_limits=PromptLimits(StepBudget(target, 16) if target else None, spread),
    )
    harness = Harness(scheduler, depth)
    submitted: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    for event in story:
        if event[0] == "add":
            request_id = len(submitted)
            submitted[request_id] = (event[1], event[2])
            sampling = SamplingParams(max_tokens=event[2], end_ids=(END,))
            scheduler.add(GenerateRequest(request_id, event[1], sampling, priority=event[3]))
        elif event[0] == "cancel":
            if event[1] in submitted and event[1] not in harness.reasons:
                cancelled.add(event[1])
                scheduler.cancel(event[1])
        else:
            for _ in range(event[1]):
                harness.step()
    harness.run_dry()
    assert set(harness.reasons) == set(submitted)
    for request_id, (prompt, max_tokens) in submitted.items():
        answer = expected_answer(prompt, max_tokens)
        sent = harness.answers[request_id]
        if request_id in cancelled:
            assert harness.reasons[request_id] == "cancelled"
            assert sent == answer[: len(sent)]
        else:
            assert sent == answer
            assert harness.reasons[request_id] == (
                "length" if len(answer) == max_tokens else "stop"
            )
    stats = scheduler.stats()
    assert stats.free_blocks == blocks
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished == len(submitted)


def test_running_out_of_blocks_preempts_only_under_max_utilization():
    for policy, preempts in (("guaranteed_no_evict", False), ("max_utilization", True)):
        harness = Harness(make_scheduler(blocks=10, policy=policy), depth=1)
        for request_id in range(4):
            harness.scheduler.add(
                GenerateRequest(request_id, [1, request_id] * 3, SamplingParams(max_tokens=25))
            )
        harness.run_dry()
        assert (harness.scheduler.stats().preemptions > 0) is preempts
        assert [len(harness.answers[r]) for r in range(4)] == [25] * 4


def test_a_long_prompt_is_spread_over_steps_beside_a_running_request():
    scheduler = make_scheduler(budget=8)
    harness = Harness(scheduler, depth=1)
    scheduler.add(GenerateRequest(0, [1], SamplingParams(max_tokens=20)))
    harness.step()
    scheduler.add(GenerateRequest(1, list(range(4, 24)), SamplingParams(max_tokens=1)))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.counts == [1, 7], (
        "the running request keeps its token, the prompt takes what is left"
    )
    assert plan.samples == [True, False]


def test_a_second_request_reuses_all_blocks_but_computes_one_token():
    scheduler = make_scheduler()
    harness = Harness(scheduler, depth=1)
    prompt = list(range(4, 16))  # exactly three blocks
    for request_id in range(2):
        scheduler.add(GenerateRequest(request_id, prompt, SamplingParams(max_tokens=2)))
        harness.run_dry()
    assert scheduler.stats().cached_prompt_tokens == 8
    assert harness.answers[0] == harness.answers[1]


@pytest.mark.parametrize(("salt", "adapter"), [("other tenant", 0), ("", 7)])
def test_tenants_and_adapters_never_share_blocks(salt, adapter):
    scheduler = make_scheduler()
    harness = Harness(scheduler, depth=1)
    prompt = list(range(4, 17))
    scheduler.add(GenerateRequest(0, prompt, SamplingParams(max_tokens=2)))
    harness.run_dry()
    scheduler.add(
        GenerateRequest(1, prompt, SamplingParams(max_tokens=2), cache_salt=salt, adapter=adapter)
    )
    harness.run_dry()
    assert scheduler.stats().cached_prompt_tokens == 0


def test_higher_priority_is_admitted_first_and_equals_keep_their_order():
    scheduler = make_scheduler(rows=1)
    for request_id, priority in enumerate([0, 5, 5, 9]):
        scheduler.add(
            GenerateRequest(request_id, [1], SamplingParams(max_tokens=1), priority=priority)
        )
    harness = Harness(scheduler, depth=1)
    harness.run_dry()
    assert list(harness.reasons) == [3, 1, 2, 0]


def test_a_deadline_ends_waiting_and_running_requests():
    now = [0.0]
    scheduler = make_scheduler(rows=1, clock=lambda: now[0])
    harness = Harness(scheduler, depth=1)
    for request_id in range(2):
        scheduler.add(GenerateRequest(request_id, [1], SamplingParams(max_tokens=20), deadline=5.0))
    harness.step()
    now[0] = 6.0
    harness.run_dry()
    assert harness.reasons == {0: "timeout", 1: "timeout"}
    assert len(harness.answers[0]) == 1
    assert harness.answers[1] == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, "no tokens"),
        ([1], 0, "max_tokens"),
        ([1] * 60, 5, "64 tokens"),
        ([50], 1, "token id 50"),
        ([-1], 1, "token id -1"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(prompt, max_tokens, words):
    scheduler = make_scheduler()
    scheduler.add(GenerateRequest(7, prompt, SamplingParams(max_tokens=max_tokens)))
    outputs = scheduler.take_outputs()
    assert outputs is not None
    assert outputs.finish_reasons == ["error"]
    assert words in outputs.errors[7]
    assert not scheduler.has_work()


def test_eviction_takes_the_end_of_the_least_recently_used_table_first():
    pool = BlockPool(3, 4)
    names = []
    for index in range(3):
        names.append(hash_block(names[-1] if names else root_hash(0, ""), [index] * 4))
    table = pool.allocate(3)
    for block, name in zip(table, names, strict=True):
        pool.register(block, name)
    pool.release(table)
    assert (pool.available, pool.cached) == (3, 3)
    pool.allocate(1)
    assert pool.find(names) == table[:2]
    pool.check_integrity([[table[2]]])
    with pytest.raises(AssertionError):
        pool.check_integrity([])


def test_blocks_are_hashed_before_the_window_releases_them():
    scheduler = make_scheduler(blocks=40, block_tokens=2, rows=2, budget=32, window=Window(3, 0))
    harness, known = Harness(scheduler, 1), [5, 6, 7]
    while len(known) < 43:
        known.append(next_token(known))
    scheduler.add(GenerateRequest(1, known[:3], SamplingParams(max_tokens=40), draft=known[3:]))
    harness.run_dry()
    assert harness.answers[1] == known[3:]
    names = [hash_block(root_hash(0, ""), known[:2])]
    for start in range(2, 40, 2):
        names.append(hash_block(names[-1], known[start : start + 2]))
    found = scheduler.blocks.find(names)
    assert len(found) >= 10, "all blocks computed in one step can be found again"
    assert NULL_BLOCK not in found, "nothing is found where there is nothing"
