"""Engines that are unloaded while idle, and loaded again by the next request."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scripted_engine as scripted
from command_line import run_cli
from submit import submit
from tiny_server import MODEL, TinyServer, is_running, make_repository, wait_for

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.child import EngineChild
from slipstream.server.engine_link.client import EngineClient, Supervision
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.link import EngineFailed

COMMAND = (sys.executable, str(Path(scripted.__file__)))
SHORT = SamplingParams(max_tokens=3)
Launch = Callable[[], Awaitable[EngineClient]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    engines = []

    async def start() -> EngineClient:
        engine = EngineClient(
            tmp_path / "fine",
            supervision=Supervision(idle_seconds=0.3),
            command=COMMAND,
            name="gpt2",
        )
        engines.append(engine)
        async with asyncio.timeout(30):
            await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.stop()


async def collect(generation: Any) -> tuple[list[int], str]:
    tokens: list[int] = []
    async with asyncio.timeout(30):
        async for output in generation:
            tokens += output.tokens
    return tokens, output.finish_reason


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def unloaded(engine: EngineClient) -> int:
    """Return the id of the engine's process when that has ended."""
    process = engine.process_id
    assert process is not None
    await until(lambda: engine.process_id is None and not is_running(process))
    return process


async def test_the_log_names_the_engine_that_is_unloaded(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await unloaded(await launch())
    assert "gpt2: the engine is unloaded: it was idle" in caplog.messages


async def test_an_idle_engine_ends_and_the_next_requests_wait_for_another(launch: Launch) -> None:
    engine = await launch()
    assert await collect(submit(engine, [7], SHORT)) == ([8, 9, 10], "length")
    former = await unloaded(engine)
    assert (engine.ready, engine.serving, engine.failure) == (True, False, None)
    assert engine.info is not None, "the sizes of the engine stay known"
    waiting = [asyncio.ensure_future(collect(submit(engine, [n], SHORT))) for n in (1, 20, 300)]
    await until(lambda: engine.outstanding == 3)
    assert [answer[0] for answer in await asyncio.gather(*waiting)] == [
        [2, 3, 4],
        [21, 22, 23],
        [301, 302, 303],
    ]
    assert engine.process_id not in (None, former)
    await until(lambda: engine.stats.finished == 4)
    await unloaded(engine)
    assert engine.stats.finished == 4, "the totals never fall"


async def test_a_late_report_of_an_unloaded_engine_does_not_fail_the_next(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit of a rank may be noticed when the next processes of the engine run."""
    reports: list[tuple[Callable[[Any], None], Callable[[str], None]]] = []
    attach = EngineChild.attach

    def record(child: EngineChild, take: Any, note_exit: Any, has_reason: Any) -> None:
        reports.append((take, note_exit))
        attach(child, take, note_exit, has_reason)

    monkeypatch.setattr(EngineChild, "attach", record)
    engine = await launch()
    await unloaded(engine)
    assert (await collect(submit(engine, [7], SHORT)))[0] == [8, 9, 10]
    process = engine.process_id
    take, note_exit = reports[0]
    take(EngineFailed("rank 1: exit code 0"))
    note_exit("rank 1: exit code 0")
    assert (engine.failure, engine.process_id) == (None, process)
    assert (await collect(submit(engine, [7], SHORT)))[0] == [8, 9, 10]
    assert engine.process_id == process


async def test_an_engine_with_work_is_not_unloaded(launch: Launch) -> None:
    engine = await launch()
    process = engine.process_id
    slow = SamplingParams(max_tokens=20, seed=100)  # 20 steps of 100 ms
    assert len((await collect(submit(engine, [7], slow)))[0]) == 20
    assert engine.process_id == process


async def test_a_request_that_waits_can_be_cancelled(launch: Launch) -> None:
    engine = await launch()
    await unloaded(engine)
    waiting = submit(engine, [7], SHORT)
    other = submit(engine, [7], SHORT)
    waiting.cancel()
    assert await collect(waiting) == ([], "cancelled")
    assert (await collect(other))[0] == [8, 9, 10]


async def test_a_load_that_fails_fails_its_requests_only(launch: Launch) -> None:
    engine = await launch()
    await unloaded(engine)
    start, command = engine._start_child.func, engine._start_child.args
    failing = (sys.executable, "-c", "raise SystemExit('no memory is left')")
    engine._start_child = partial(start, failing, *command[1:])
    tokens, reason = await collect(submit(engine, [7], SHORT))
    assert (tokens, reason) == ([], "error")
    await until(lambda: engine.process_id is None)
    assert not engine.ready
    engine._start_child = partial(start, *command)
    assert (await collect(submit(engine, [7], SHORT)))[0] == [8, 9, 10]
    assert engine.ready


async def test_requests_are_refused_once_the_server_drains(launch: Launch) -> None:
    engine = await launch()
    await unloaded(engine)
    engine.begin_drain()
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="the server is shutting down"):
        submit(engine, [7], SHORT)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TinyServer]:
    repository = make_repository(tmp_path)
    running = TinyServer(repository, tmp_path / "tmp", "--idle-unload", "1").wait_started()
    yield running
    running.close()


def test_a_server_unloads_an_idle_engine_and_stays_ready(server: TinyServer) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    wait_for(lambda: server.engine_process() == 0)
    with urllib.request.urlopen(f"{server.url}/v2/health/ready", timeout=30) as answer:
        assert answer.status == 200
    body = {"text_input": "5", "max_tokens": 3}
    assert post(f"/v2/models/{MODEL}/generate", body)["text_output"] == "6 7 8"
    assert server.engine_process() != 0
    wait_for(lambda: server.engine_process() == 0)
    completion = {"model": MODEL, "prompt": "7", "max_tokens": 2, "temperature": 0}
    assert post("/v1/completions", completion)["choices"][0]["text"].split() == ["8", "9"]


def test_several_server_processes_are_refused(tmp_path: Path) -> None:
    result = run_cli(["start", "--repo", tmp_path, "--idle-unload", "5", "--frontends", "2"])
    assert result.exit_code == 2
    assert "--idle-unload needs a single server process" in result.stderr
