"""A step that the device cannot carry out costs the request that asked most of it, and nobody else."""

from pathlib import Path

import pytest
from run_engine import run_all
from tiny_engine import build_tiny_engine

from slipstream.engine.plan import StepFailed, StepPlan
from slipstream.engine.request import GenerateRequest, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.load import start_engine

TOO_MANY = 40


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


def requests() -> list[GenerateRequest]:
    prompts = [[5, 6, 7], list(range(2, 30)), [9] * 60, [11, 12]]
    return [GenerateRequest(i, prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_largest_fails_and_the_others_answer_as_alone(engine_folder: Path, depth: int) -> None:
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
