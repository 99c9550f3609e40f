"""The scheduler's statistics, which the metrics report, on requests with a known course."""

from slipstream.engine.blocks import BlockPool
from slipstream.engine.messages import QUEUE_SECONDS_BOUNDS
from slipstream.engine.plan import StepResult
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler

BLOCK = 4


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def scheduler(blocks=16, rows=2, step_tokens=64, policy="guaranteed_no_evict", clock=None):
    pool = BlockPool(blocks, BLOCK)
    return Scheduler(pool, rows, step_tokens, 64, 1000, policy, clock=clock or Clock())


def submit(found, request_id, prompt, max_tokens):
    found.add(GenerateRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens)))


def step(found):
    """One step of a device that always samples 7."""
    plan = found.plan()
    if plan is not None:
        found.commit(plan, StepResult(tokens=[7] * sum(plan.samples)))
    return plan


def test_stats_count_context_and_generation_requests_of_a_step():
    found = scheduler()
    submit(found, 1, range(10), 5)
    step(found)
    first = found.stats()
    assert (first.context_requests, first.context_tokens, first.generation_requests) == (1, 10, 1)
    submit(found, 2, range(20, 26), 5)
    step(found)
    second = found.stats()
    assert (second.context_requests, second.context_tokens, second.generation_requests) == (1, 6, 2)
    step(found)
    third = found.stats()
    assert (third.context_requests, third.context_tokens, third.generation_requests) == (0, 0, 2)
    assert (third.running, third.waiting, third.steps) == (2, 0, 3)


def test_a_chunked_prompt_counts_as_context_until_its_last_token():
    found = scheduler(step_tokens=8)
    submit(found, 1, range(12), 4)
    step(found)
    assert (found.stats().context_tokens, found.stats().generation_requests) == (8, 0)
    step(found)
    assert (found.stats().context_tokens, found.stats().generation_requests) == (4, 1)
    step(found)
    assert found.stats().context_requests == 0


def test_queue_time_ends_at_the_first_step():
    clock = Clock()
    found = scheduler(rows=1, clock=clock)
    submit(found, 1, range(4), 2)
    submit(found, 2, range(4, 8), 2)
    submit(found, 3, range(4, 8), 2)
    step(found)  # the first one did not wait
    found.cancel(3)  # never started: does not count
    clock.now += 3.0
    for _ in range(3):
        step(found)
    stats = found.stats()
    assert stats.queue_seconds == 3.0
    expected = [0] * (len(QUEUE_SECONDS_BOUNDS) + 1)
    expected[0] = 1
    expected[QUEUE_SECONDS_BOUNDS.index(5.0)] = 1
    assert stats.queue_counts == expected
    assert (stats.finished, stats.cancelled, stats.failed) == (3, 1, 0)


def test_reused_blocks_and_cached_tokens():
    found = scheduler()
    for request_id in (1, 2):
        submit(found, request_id, range(10), 2)
        while found.has_work():
            step(found)
            found.take_outputs()
    stats = found.stats()
    assert stats.reused_blocks == 2  # ten prompt tokens fill two blocks
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (20, 2 * BLOCK)


def test_preempted_requests_are_paused_until_they_run_again():
    found = scheduler(blocks=6, policy="max_utilization")
    submit(found, 1, range(8), 12)
    submit(found, 2, range(100, 108), 12)
    paused = []
    while found.has_work():
        step(found)
        found.take_outputs()
        paused.append(found.stats().paused)
    assert max(paused) == 1
    assert paused[-1] == 0
    stats = found.stats()
    assert stats.preemptions > 0
    assert sum(stats.queue_counts) == 2  # a resumed request does not count again
    assert stats.output_tokens >= 24


def test_refused_requests_count_as_failed():
    found = scheduler()
    submit(found, 1, [], 2)
    found.take_outputs()
    submit(found, 2, range(4), 2)
    found.cancel(2, "error")
    assert (found.stats().failed, found.stats().finished) == (2, 1)
