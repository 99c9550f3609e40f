"""When the device cannot carry out a step, the request with the most tokens fails, and no other."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_engine import run_all
from scheduler_harness import END, Harness, expected_answer, make_scheduler
from tiny_engine import build_tiny_engine

from slipstream.engine.plan import StepFailed, StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.load import start_engine

TOO_MANY = 40


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


def requests() -> list[GenerateRequest]:
    prompts = [[5, 6, 7], list(range(2, 30)), [9] * 60, [11, 12]]
    return [
        GenerateRequest(i, prompt, SamplingParams(max_tokens=12))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_in_a_failed_step_the_largest_request_fails_and_the_others_are_unchanged(
    engine_folder: Path, depth: int
) -> None:
    settings = EngineSettings(dtype="float32", max_rows=4, cache_tokens=1024, step_tokens=128)
    expected = run_all(start_engine(engine_folder, settings), requests())
    loop = start_engine(engine_folder, settings)
    loop.depth = depth
    real_launch = loop.runner.launch

    def launch(plan: StepPlan):  # type: ignore[no-untyped-def]
        if any(count > TOO_MANY for count in plan.counts):
            raise StepFailed("no room")
        return real_launch(plan)

    loop.runner.launch = launch  # type: ignore[method-assign]
    answers = run_all(loop, requests())
    assert answers.reasons[2] == "error"
    assert answers.errors[2] == "no room"
    for request_id in (0, 1, 3):
        assert answers[request_id] == expected[request_id]
        assert answers.reasons[request_id] == "length"
    loop.check_integrity()
    assert loop.stats().free_blocks == loop.stats().total_blocks


def test_blocks_that_a_failed_step_did_not_load_cannot_be_found() -> None:
    """Prompts of five blocks in a pool of eight: the third is loaded from the host in a step that
    fails.
    """
    harness = Harness(make_scheduler(blocks=8, rows=1, host_slots=20), depth=1)
    scheduler, prompts = harness.scheduler, [[n, *range(10, 29)] for n in (1, 2, 1)]
    for request_id, prompt in enumerate(prompts[:2]):
        scheduler.add(
            GenerateRequest(request_id, prompt, SamplingParams(max_tokens=2, end_ids=(END,)))
        )
        harness.run_dry()
    scheduler.add(GenerateRequest(2, prompts[2], SamplingParams(max_tokens=2, end_ids=(END,))))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.loads
    assert plan.saves
    scheduler.abandon(plan, "no room")
    scheduler.check_integrity()
    scheduler.add(GenerateRequest(3, prompts[2], SamplingParams(max_tokens=2, end_ids=(END,))))
    harness.run_dry()  # the harness checks what every token was computed from
    assert harness.answers[3] == expected_answer(prompts[2], 2)
    assert harness.reasons[2] == "error"


def test_blocks_move_although_the_gpu_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests find the blocks that a plan copies or saves in host memory."""
    pytest.importorskip("triton", reason="what runs on a GPU needs it")
    from slipstream.engine.gpu.runner import GpuRunner

    def no_room(plan: StepPlan) -> None:
        raise torch.OutOfMemoryError("none left")

    runner, moved = object.__new__(GpuRunner), []
    runner.host, runner.block_tokens = SimpleNamespace(move=moved.append), 8  # type: ignore[assignment]
    runner.cache = torch.arange(32.0).view(1, 1, 1, 32, 1)
    monkeypatch.setattr(runner, "_launch", no_room)
    plan = StepPlan(step=1, copies=[(1, 3)], rows=[0], counts=[5])
    with pytest.raises(StepFailed, match="ran out of memory in a step of 5 tokens"):
        runner.launch(plan)
    assert moved == [plan]
    assert runner.cache.flatten()[24:].tolist() == list(range(8, 16))
