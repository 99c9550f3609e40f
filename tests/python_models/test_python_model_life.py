"""Processes of Python models: restarts, cancellation, batching, and their end with the server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from python_model_harness import (
    MIMIC,
    ask,
    models_of,
    open_models,
    response_texts,
    text_request,
    text_tensor,
    write_model,
)

from slipstream.repository.models import read_repository
from slipstream.repository.problems import RepositoryError
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, ModelVersion
from slipstream.server.python_models.calls import PythonModelContext
from slipstream.server.python_models.model import PythonModel, RestartLimit

SLEEPER = """
import time, numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0].decode()
            if text.startswith("sleep"): time.sleep(float(text[5:]))
            if text == "crash": import os; os._exit(9)
            answer = f"{text} {len(requests)}".encode()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([answer], object))]))
        return answers
"""


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


FORKING = """
import multiprocessing, time
""" + SLEEPER.replace(
    "    def execute",
    """    def initialize(self, args):
        self.helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        self.helper.start()
    def execute""",
    1,
)


async def test_the_end_of_a_process_is_seen_while_its_children_hold_the_sockets(
    tmp_path: Path,
) -> None:
    async with open_models(write_model(tmp_path, "forking", FORKING), "forking") as models:
        model = models["forking"]
        (process,) = model.process_ids
        (failed,) = await asyncio.wait_for(ask(model, "crash"), 20)
        assert failed.error is not None
        assert (
            failed.error.message == "the process of model instance 'forking_0' ended: exit code 9"
        )
        assert response_texts(await ask(model, "again")) == ["again 1"]
        assert model.process_ids != [process]
        await until(lambda: not in_group(process))  # the child process ended with it


def in_group(leader: int) -> list[int]:
    """Return the running processes of a group."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            state, _, group = place.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(place.parent.name))
    return found


async def test_a_killed_process_fails_its_requests_and_is_restarted(tmp_path: Path) -> None:
    async with open_models(write_model(tmp_path, "sleeper", SLEEPER), "sleeper") as models:
        model = models["sleeper"]
        (process,) = model.process_ids
        running = asyncio.ensure_future(ask(model, "sleep30"))
        await until(lambda: model._running)
        waiting = asyncio.ensure_future(ask(model, "later"))
        await asyncio.sleep(0)
        os.kill(process, signal.SIGKILL)
        (failed,) = await running
        assert failed.error is not None
        assert (
            failed.error.message
            == "the process of model instance 'sleeper_0' ended: killed by SIGKILL"
        )
        assert failed.error.code is Code.INTERNAL
        assert response_texts(await waiting) == [
            "later 1"
        ]  # the request was not started, so it was executed again
        assert model.process_ids != [process]


async def test_a_model_that_keeps_dying_is_not_restarted(tmp_path: Path) -> None:
    config = models_of(write_model(tmp_path, "sleeper", SLEEPER))["sleeper"].config
    model = PythonModel(
        config, tmp_path / "sleeper" / "1", _empty_context(), RestartLimit(restarts=2)
    )
    await model.start()
    for _ in range(3):
        assert response_texts(await ask(model, "crash")) == [
            "! the process of model instance 'sleeper_0' ended: exit code 9"
        ]
    assert not model.ready
    with pytest.raises(InferenceError, match="no instance of model 'sleeper' is running"):
        await ask(model, "x")
    await model.close()


def _empty_context() -> PythonModelContext:
    def find(name: str, version: str) -> ModelVersion:
        raise InferenceError(f"there is no {name}")

    return PythonModelContext(find)


async def test_waiting_requests_fail_when_the_model_cannot_restart(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        SLEEPER
        + f"""
    def initialize(self, args):
        if __import__("os").path.exists({str(started)!r}): raise RuntimeError("only once")
        open({str(started)!r}, "w").close()
"""
    )
    async with open_models(write_model(tmp_path, "sleeper", code), "sleeper") as models:
        model = models["sleeper"]
        crashed = asyncio.ensure_future(ask(model, "crash"))
        await until(lambda: model._running or crashed.done())
        (waiting,) = await ask(model, "later")
        assert waiting.error is not None
        assert waiting.error.code is Code.UNAVAILABLE
        assert "did not start: RuntimeError: only once" in waiting.error.message
        assert response_texts(await crashed) == [
            "! the process of model instance 'sleeper_0' ended: exit code 9"
        ]
        assert not model.ready


async def test_a_cancelled_request_is_seen_by_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("SLOW_MODEL_LOG", str(log))
    async with open_models(MIMIC, "slow", "slow_nd") as models:
        assert len(models["slow"].process_ids) == 4  # the count of the instance group
        answers = models["slow"].infer(text_request("400", id="streamed"))
        assert response_texts([await anext(answers), await anext(answers)]) == ["tok0", "tok1"]
        await answers.aclose()
        unary = asyncio.ensure_future(ask(models["slow_nd"], text_request("60000", id="unary")))
        await until(lambda: models["slow_nd"]._running)
        unary.cancel()
        await until(lambda: log.exists() and log.read_text().count("cancelled=True") == 2)
        assert "id='streamed' asked=400" in log.read_text()
        assert "nd id='unary' asked_ms=60000 cancelled=True" in log.read_text()
        assert response_texts(await ask(models["slow_nd"], "1")) == ["1"]


async def test_a_request_cancelled_while_it_waits_is_not_executed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    noted = f"open({str(log)!r}, 'a').write(text + ' ')"
    code = SLEEPER.replace(
        "            if text == ", f"            {noted}\n            if text == "
    )
    async with open_models(write_model(tmp_path, "sleeper", code), "sleeper") as models:
        model = models["sleeper"]
        tasks = [asyncio.ensure_future(ask(model, text)) for text in ("sleep0.3", *"abcdefgh")]
        await until(lambda: len(model._running) > 1)
        # one that the process has received and one that it has not
        for dropped in (tasks[2], tasks[7]):
            dropped.cancel()
        kept = [response_texts(await task) for task in tasks if task not in (tasks[2], tasks[7])]
        assert kept == [[f"{text} 1"] for text in ("sleep0.3", "a", "c", "d", "e", "f", "h")]
    assert log.read_text().split() == ["sleep0.3", "a", "c", "d", "e", "f", "h"]


async def test_waiting_requests_are_executed_together(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "sleeper", SLEEPER, "max_batch_size: 4\ndynamic_batching { }")
    write_model(folder, "single", SLEEPER, "max_batch_size: 4")
    async with open_models(folder, "sleeper", "single") as models:

        def request(text: str, rows: int = 1, width: int = 1) -> InferRequest:
            tensor = text_tensor(text, shape=(rows, width))
            tensor.data = tensor.data * rows * width
            return InferRequest("sleeper", "1", {"text_input": tensor})

        async def together(name: str) -> list[str]:
            first = asyncio.ensure_future(ask(models[name], request("sleep0.3")))
            await until(lambda: models[name]._running)
            rest = [
                request("a"),
                request("b", rows=2),
                request("c", rows=2),
                request("d", width=2),
                request("e"),
            ]
            answers = await asyncio.gather(first, *(ask(models[name], one) for one in rest))
            return [response_texts(answer)[0] for answer in answers]

        # a and b fill three of four rows; c would be five; d has another shape; e comes after d.
        assert await together("sleeper") == ["sleep0.3 1", "a 2", "b 2", "c 1", "d 1", "e 1"]
        assert await together("single") == ["sleep0.3 1", "a 1", "b 1", "c 1", "d 1", "e 1"]


async def test_a_full_queue_refuses_and_a_stale_request_expires(tmp_path: Path) -> None:
    policy = "default_queue_policy { max_queue_size: 1 default_timeout_microseconds: 1000 }"
    folder = write_model(
        tmp_path, "sleeper", SLEEPER, "max_batch_size: 1\ndynamic_batching { " + policy + " }"
    )
    async with open_models(folder, "sleeper") as models:
        model = models["sleeper"]
        request = InferRequest("", "", {"text_input": text_tensor("sleep0.3", shape=(1, 1))})
        running = asyncio.ensure_future(ask(model, request))
        await until(lambda: model._running)
        stale = asyncio.ensure_future(
            ask(model, InferRequest("", "", {"text_input": text_tensor("x", shape=(1, 1))}))
        )
        await asyncio.sleep(0)
        with pytest.raises(InferenceError, match="Exceeds maximum queue size") as refused:
            await ask(model, request)
        assert refused.value.code is Code.UNAVAILABLE
        assert response_texts(await running) == ["sleep0.3 1"]
        assert response_texts(await stale) == ["! Request timeout expired"]


async def test_finalize_runs_and_no_process_is_left(tmp_path: Path) -> None:
    code = (
        SLEEPER
        + f"""
    def finalize(self):
        open({str(tmp_path / "finalized")!r}, "w").write("yes")
"""
    )
    async with open_models(write_model(tmp_path, "sleeper", code), "sleeper") as models:
        (process,) = models["sleeper"].process_ids
    assert (tmp_path / "finalized").read_text() == "yes"
    assert not Path(f"/proc/{process}").exists()


PARENT = """
import asyncio, os, signal, sys
sys.path.insert(0, {here!r})
from python_model_harness import open_models, MIMIC
async def main():
    async with open_models(MIMIC, "echo") as models:
        print(models["echo"].process_ids[0], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_model_dies_with_its_server() -> None:
    command = [sys.executable, "-c", PARENT.format(here=str(Path(__file__).parents[1] / "support"))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    assert Path(f"/proc/{process}").exists()
    parent.kill()
    parent.wait()
    await until(lambda: not Path(f"/proc/{process}").exists() or "Z" in _state(process))


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


async def test_output_and_log_lines_reach_the_servers_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import sys, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        print("plain output"); print("an error line", file=sys.stderr)
        pb_utils.Logger.log_warn("take care")
    def execute(self, requests): return []
"""
    logged = ""
    texts = ("plain output", "an error line", "take care")
    async with open_models(write_model(tmp_path, "talker", code), "talker"), asyncio.timeout(20):
        while not all(f"] {text}\n" in logged for text in texts):
            await asyncio.sleep(0.01)
            logged += capsys.readouterr().err
    lines = logged.splitlines()
    assert [
        line for line in lines if line.startswith("I") and line.endswith("talker_0] plain output")
    ]
    assert [
        line for line in lines if line.startswith("I") and line.endswith("talker_0] an error line")
    ]
    assert [
        line for line in lines if line.startswith("W") and line.endswith("model.py:6] take care")
    ]


def test_without_the_flag_a_model_is_refused_by_name_and_not_imported(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = write_model(tmp_path / "models", "poison", f"open({str(marker)!r}, 'w').write('ran')")
    with pytest.raises(RepositoryError) as refused:
        read_repository(folder)
    assert any("'poison'" in str(problem) for problem in refused.value.problems)
    assert not marker.exists()
    assert "model" not in sys.modules
    assert "triton_python_backend_utils" not in sys.modules
