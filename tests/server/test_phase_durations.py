"""The phases of a request, of the steps that an ensemble runs as one, and of those it calls."""

from __future__ import annotations

from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.server.engine_link.engine import StageTimes
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelVersion,
    RequestTimes,
    ServedModel,
)
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.metrics.statistics import PHASES, Spent, spent_by_steps
from slipstream.server.metrics.statistics_api import counters_document

NAMES = ("encoded", "prepared", "submitted", "produced", "received", "taken", "decoded")


def stages(*moments: int) -> StageTimes:
    return StageTimes(**{f"{name}_ns": ns for name, ns in zip(NAMES, moments, strict=True)})


def test_each_step_has_the_time_between_its_stages() -> None:
    times = RequestTimes(
        input_ended_ns=1_003, stages=stages(1_010, 1_012, 1_017, 1_500, 1_520, 1_521, 1_530)
    )
    times.engine_queue_ns = 100
    assert spent_by_steps(1_000, 1_600, times) == {
        "compute_input": Spent(0, 3, 7, 2),
        "compute_infer": Spent(100, 5, 383, 20),
        "compute_output": Spent(0, 1, 9, 70),
    }


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        # the prompt was refused
        ((0, 0, 0, 0, 0, 0, 0), [(0, 3, 597, 0), (0, 0, 0, 0), (0, 0, 0, 0)]),
        # the request was cancelled in the engine
        ((10, 12, 17, 0, 0, 0, 0), [(0, 3, 7, 2), (0, 5, 583, 0), (0, 0, 0, 0)]),
        # a stop word ended it: the engine's own end is not awaited
        ((10, 12, 17, 0, 0, 0, 530), [(0, 3, 7, 2), (0, 5, 513, 0), (0, 0, 0, 70)]),
    ],
)
def test_time_after_the_last_stage_counts_for_the_phase_it_began(
    reached: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    times = RequestTimes(
        input_ended_ns=1_003, stages=stages(*(1_000 + ns if ns else 0 for ns in reached))
    )
    assert [tuple(spent) for spent in spent_by_steps(1_000, 1_600, times).values()] == expected


def test_a_batch_reaches_a_stage_with_its_last_item() -> None:
    times = RequestTimes()
    for shift in (0, 50):
        branch = times.branch()
        branch.input_ended_ns = 1_003 + shift
        branch.stages = stages(
            *(ns + shift for ns in (1_060, 1_061, 1_062, 1_300, 1_301, 1_302, 1_303))
        )
    spent = spent_by_steps(1_000, 1_600, times)
    assert spent["compute_input"] == Spent(0, 53, 57, 1)
    assert spent["compute_infer"] == Spent(0, 1, 238, 1)


@given(st.lists(st.integers(0, 2_000), min_size=9, max_size=9), st.integers(0, 3_000))
def test_steps_cover_the_request_whatever_the_clocks_say(moments: list[int], queue: int) -> None:
    times = RequestTimes(input_ended_ns=moments[0], stages=stages(*moments[1:8]))
    times.engine_queue_ns = queue
    steps = spent_by_steps(500, 500 + moments[8], times)
    assert all(ns >= 0 for spent in steps.values() for ns in spent)
    assert sum(map(sum, steps.values())) == moments[8] == sum(Spent.total_of(steps.values()))


class Slow(ServedModel):
    """A model that notes its phases, or an ensemble that calls two of them."""

    def __init__(self, name: str, steps: tuple[Any, ...] = ()) -> None:
        self.config: Any = SimpleNamespace(
            name=name, max_batch_size=0, ensemble_steps=steps, parameter={}.get
        )
        self._steps = steps

    async def infer(self, request: InferRequest) -> Any:
        for step in self._steps:
            times = RequestTimes(ensemble=request.times)
            asked = InferRequest(step.config.name, "1", {}, times=times)
            async with aclosing(step.infer(asked)) as responses:
                async for _ in responses:
                    pass
        if not self._steps:
            request.times.leave_queue()
            request.times.end_input()
            request.times.end_infer()
        yield InferResponse()


async def test_an_ensemble_of_separate_models_has_the_sums_of_their_phases() -> None:
    metrics = ServerMetrics()
    steps = tuple(
        metrics.count(ModelVersion(name, "1", Slow(name))) for name in ("first", "second")
    )
    ensemble = metrics.count(ModelVersion("chain", "1", Slow("chain", steps)))
    for _ in range(3):
        async with aclosing(ensemble.infer(InferRequest("chain", "1", {}))) as responses:
            assert len([response async for response in responses]) == 1
    spent = {
        name: counters_document(metrics.model(name), name, "1")["inference_stats"]
        for name in ("chain", "first", "second")
    }
    for phase in PHASES:
        parts = [spent[name][phase]["ns"] for name in ("first", "second")]
        assert min(parts) > 0
        assert spent["chain"][phase]["ns"] == sum(parts)
    requests = [spent[name]["success"]["ns"] for name in ("first", "second")]
    assert spent["chain"]["success"]["ns"] >= sum(requests)
    assert spent["chain"]["queue"]["ns"] == 0
