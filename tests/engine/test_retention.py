"""Retention priorities of cached blocks: in the pool, in the scheduler and in an engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, make_scheduler

from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.eviction import (
    DEFAULT_PRIORITY,
    IdleBlocks,
    Retention,
    RetentionPriority,
    RetentionRange,
)
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams

keeps = st.one_of(
    st.none(),
    st.builds(RetentionPriority, st.integers(0, 100), st.one_of(st.none(), st.integers(0, 5000))),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12), keeps),
        st.tuples(st.just("remove"), st.integers(1, 12)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("wait"), st.floats(0.0, 4.0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(events)
def test_the_lowest_priority_is_evicted_first_and_then_the_least_recently_used(story):
    now = [0.0]
    idle = IdleBlocks(clock=lambda: now[0])
    # (block, priority, end), in the order in which they got that priority
    model: list[tuple[int, int, float | None]] = []
    for event in story:
        if event[0] == "add" and event[1] not in [block for block, _, _ in model]:
            keep = event[2]
            idle.add(event[1], keep)
            usual = keep is None or keep.priority == DEFAULT_PRIORITY
            until = (
                None if usual or keep.milliseconds is None else now[0] + keep.milliseconds / 1000
            )
            model.append((event[1], DEFAULT_PRIORITY if usual else keep.priority, until))
        elif event[0] == "remove" and event[1] in [block for block, _, _ in model]:
            idle.remove(event[1])
            model = [entry for entry in model if entry[0] != event[1]]
        elif event[0] == "wait":
            now[0] += event[1]
        elif event[0] == "pop" and model:
            over = sorted(
                (entry for entry in model if entry[2] is not None and entry[2] <= now[0]),
                key=lambda entry: (entry[2], entry[0]),
            )
            model = [entry for entry in model if entry not in over]
            model += [(block, DEFAULT_PRIORITY, None) for block, _, _ in over]
            expected = min(model, key=lambda entry: entry[1])
            assert idle.pop() == expected[0]
            model.remove(expected)
        assert sorted(idle) == sorted(block for block, _, _ in model)
        assert len(idle) == len(model)
        assert all(block in idle for block, _, _ in model)


def test_the_first_token_of_a_block_selects_its_retention_range():
    retention = Retention(
        (
            RetentionRange(0, 8, RetentionPriority(90)),
            RetentionRange(6, None, RetentionPriority(10, 500)),
        ),
        answer=RetentionPriority(1),
    )
    assert [retention.find_priority(first, 16) for first in (0, 4, 8, 12, 16, 20)] == [
        RetentionPriority(90),
        RetentionPriority(90),
        RetentionPriority(10, 500),
        RetentionPriority(10, 500),
        RetentionPriority(1),
        RetentionPriority(1),
    ]
    assert Retention((RetentionRange(4, 8, RetentionPriority(90)),)).find_priority(0, 16) is None
    assert Retention().find_priority(16, 16) is None


def leave(
    harness: Harness, request_id: int, prompt: list[int], retention: Retention | None = None
) -> int:
    """Run a request; return how many of its prompt tokens were cached."""
    before = harness.scheduler.stats().cached_prompt_tokens
    harness.scheduler.add(
        GenerateRequest(request_id, prompt, SamplingParams(max_tokens=1), retention=retention)
    )
    harness.run_dry()
    return harness.scheduler.stats().cached_prompt_tokens - before


@pytest.mark.parametrize(("priority", "kept"), [(90, 12), (None, 0), (0, 0)])
def test_a_prompt_of_high_priority_outlives_others(priority, kept):
    """The pool holds four prompts; six others come after the one with a high priority."""
    harness = Harness(make_scheduler(blocks=16, block_tokens=4, budget=64), depth=1)
    retention = (
        None
        if priority is None
        else Retention((RetentionRange(0, None, RetentionPriority(priority)),))
    )
    leave(harness, 0, [1] * 13, retention)
    for other in range(1, 7):
        assert leave(harness, other, [other + 1] * 13) == 0
    assert leave(harness, 7, [1] * 13) == kept


def test_a_later_request_can_raise_the_priority_of_cached_blocks():
    harness = Harness(make_scheduler(blocks=16, block_tokens=4, budget=64), depth=1)
    leave(harness, 0, [1] * 13)
    assert (
        leave(harness, 1, [1] * 13, Retention((RetentionRange(0, None, RetentionPriority(80)),)))
        == 12
    )
    for other in range(2, 8):
        leave(harness, other, [other + 1] * 13)
    assert leave(harness, 8, [1] * 13) == 12


def test_a_block_loses_its_priority_with_its_hash():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.set_retention(block, RetentionPriority(90))  # not hashed yet: no effect
    pool.register(block, b"a")
    pool.set_retention(block, RetentionPriority(0))
    pool.release([block])
    pool.check_integrity()
    for taken in pool.allocate(2):
        pool.register(taken, bytes([taken]))
        pool.release([taken])
    pool.check_integrity()
    assert not pool._retention
