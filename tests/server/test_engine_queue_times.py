"""What a request spent in its engine's queue counts as waiting in the statistics, and not as
computing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from slipstream.engine.messages import Timing
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.metrics.statistics import ModelCounters


async def spent(
    request: InferRequest, generated: AsyncGenerator[InferResponse, None]
) -> dict[str, Any]:
    """The nanoseconds of the statistics after this request; the parts are never below zero and make
    up the whole.
    """
    counters = ModelCounters()
    async with aclosing(counters.record(request, generated)) as recorded:
        async for _ in recorded:
            pass
    times = {
        name: entry["ns"] for name, entry in counters.document("m", "1")["inference_stats"].items()
    }
    parts = [times[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert min(parts) >= 0
    assert sum(parts) == times["success"]
    return times


async def test_the_engines_queue_counts_as_waiting_and_the_longest_of_a_batch_for_all():
    request = InferRequest("llm", "1", {})

    async def generated():
        request.times.end_input()
        await asyncio.sleep(0.004)
        for number in (2, 1):
            branch = request.times.branch()
            branch.add_tokens(
                3, 1, Timing(arrived_ns=10**6, first_scheduled_ns=(1 + number) * 10**6)
            )
        request.times.branch().add_tokens(3, 1, Timing(arrived_ns=10**6))  # never came to run
        request.times.end_infer()
        yield InferResponse()

    times = await spent(request, generated())
    assert times["queue"] == 2 * 10**6
    assert times["compute_infer"] >= 2 * 10**6


async def test_a_wait_that_is_longer_than_the_request_leaves_nothing_below_zero():
    """Clocks of two processes are read one after the other."""
    request = InferRequest("llm", "1", {})

    async def generated():
        request.times.end_input()
        request.times.add_tokens(3, 1, Timing(arrived_ns=1, first_scheduled_ns=10**12))
        request.times.end_infer()
        yield InferResponse()

    times = await spent(request, generated())
    assert times["compute_infer"] == 0
