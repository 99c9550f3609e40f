"""Time in the engine's queue counts as queue time in the statistics, not as compute time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from slipstream.engine.messages import Timing
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.metrics.statistics import ModelCounters
from slipstream.server.metrics.statistics_api import counters_document


async def measured_times(
    request: InferRequest, generated: AsyncGenerator[InferResponse, None]
) -> dict[str, Any]:
    """Return the durations in the statistics after this request, in nanoseconds.

    Check that no part is negative and that the parts add up to the whole.
    """
    counters = ModelCounters()
    async with aclosing(counters.record(request, generated)) as recorded:
        async for _ in recorded:
            pass
    times = {
        name: entry["ns"]
        for name, entry in counters_document(counters, "m", "1")["inference_stats"].items()
    }
    parts = [times[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert min(parts) >= 0
    assert sum(parts) == times["success"]
    return times


async def test_queue_time_of_a_batch_is_the_longest_of_its_requests():
    request = InferRequest("llm", "1", {})

    async def generated():
        request.times.end_input()
        await asyncio.sleep(0.004)
        for number in (2, 1):
            branch = request.times.branch()
            branch.add_tokens(
                3, 1, Timing(arrived_ns=10**6, first_scheduled_ns=(1 + number) * 10**6)
            )
        request.times.branch().add_tokens(3, 1, Timing(arrived_ns=10**6))  # never scheduled
        request.times.end_infer()
        yield InferResponse()

    times = await measured_times(request, generated())
    assert times["queue"] == 2 * 10**6
    assert times["compute_infer"] >= 2 * 10**6


async def test_no_duration_is_negative_when_the_queue_time_exceeds_the_request():
    """This can happen because the clocks of two processes are read at different moments."""
    request = InferRequest("llm", "1", {})

    async def generated():
        request.times.end_input()
        request.times.add_tokens(3, 1, Timing(arrived_ns=1, first_scheduled_ns=10**12))
        request.times.end_infer()
        yield InferResponse()

    times = await measured_times(request, generated())
    assert times["compute_infer"] == 0
