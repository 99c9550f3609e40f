"""The engine process under its supervisor: real processes, killed, hung and broken for real."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import scripted_engine as scripted
from submit import submit

from slipstream.engine.request import SamplingParams
from slipstream.server.engine_link.client import EngineClient, EngineStartFailed, Supervision
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.metrics.metrics import ServerMetrics

COMMAND = (sys.executable, str(Path(scripted.__file__)))
LONG = SamplingParams(max_tokens=100_000, seed=5)


@pytest.fixture
async def launch(tmp_path):
    engines = []

    async def start(name="fine", **supervision):
        engine = EngineClient(
            tmp_path / name, supervision=Supervision(**supervision), command=COMMAND
        )
        engines.append(engine)
        async with asyncio.timeout(30):
            await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.stop()


async def collect(generation):
    tokens, last = [], None
    async with asyncio.timeout(30):
        async for last in generation:
            tokens += last.tokens
    return tokens, last


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def process_exists(process_id):
    status = Path(f"/proc/{process_id}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_requests_side_by_side_get_their_own_tokens_and_finish_once(launch):
    engine = await launch()
    assert engine.ready
    assert engine.info.vocab_size == 1000
    params = SamplingParams(max_tokens=20)
    generations = [submit(engine, [start], params) for start in range(0, 80, 10)]
    for start, (tokens, last) in zip(
        range(0, 80, 10), await asyncio.gather(*map(collect, generations)), strict=True
    ):
        assert tokens == list(range(start + 1, start + 21))
        assert last.finish_reason == "length"
    assert engine.outstanding == 0
    await until(lambda: engine.stats.finished == 8)


async def test_a_reader_that_comes_late_finds_one_merged_delta(launch):
    engine = await launch()
    generation = submit(engine, [1], SamplingParams(max_tokens=10))
    await until(lambda: generation.finished)
    delta = await anext(generation)
    assert delta.tokens == list(range(2, 12))
    assert delta.finish_reason == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_cancel_ends_the_request_with_the_given_reason_and_only_that_one(launch):
    engine = await launch()
    stays, goes = (
        submit(engine, [1], SamplingParams(max_tokens=50, seed=2)),
        submit(engine, [1], LONG),
    )
    await anext(goes)
    goes.cancel("stop")
    assert (await collect(goes))[1].finish_reason == "stop"
    goes.cancel()  # harmless after the end
    assert (await collect(stays))[0] == list(range(2, 52))


async def test_searches_for_garbage_leave_out_what_a_start_has_made(launch):
    engine = await launch()
    (spared,), _ = await collect(submit(engine, [scripted.SPARED], SamplingParams()))
    assert spared > 10_000


async def test_what_the_engine_refuses_is_an_error_of_that_request(launch):
    engine = await launch()
    tokens, last = await collect(submit(engine, [scripted.REFUSE], SamplingParams()))
    assert (tokens, last.finish_reason, last.error) == ([], "error", "refused by order")
    assert engine.ready


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (scripted.RAISE, "the engine process failed: RuntimeError: raised by order"),
        (scripted.DIE, "the engine process failed: killed by SIGKILL"),
    ],
)
async def test_death_fails_what_was_in_flight_then_a_new_process_serves(
    launch, order, reason, capfd
):
    engine = await launch()
    first = engine.process_id
    bystander = submit(engine, [1], LONG)
    await anext(bystander)
    culprit = submit(engine, [order], SamplingParams())
    for generation in (bystander, culprit):
        last = (await collect(generation))[1]
        assert (last.finish_reason, last.error) == ("error", reason)
    assert not engine.ready
    with pytest.raises(EngineUnavailable):
        submit(engine, [1], SamplingParams())
    await until(lambda: engine.ready)
    assert engine.process_id != first
    assert engine.failure is None
    assert (await collect(submit(engine, [5], SamplingParams(max_tokens=2))))[0] == [6, 7]
    if order == scripted.RAISE:
        assert "Traceback (most recent call last)" in capfd.readouterr().err


async def test_killed_from_outside_while_idle_it_comes_back(launch):
    engine = await launch()
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: not engine.ready)
    assert engine.failure == "killed by SIGKILL"
    await until(lambda: engine.ready)


async def test_restarts_are_bounded(launch):
    engine = await launch(restarts=2)
    for _ in range(2):
        await collect(submit(engine, [scripted.DIE], SamplingParams()))
        await until(lambda: engine.ready)
    await collect(submit(engine, [scripted.DIE], SamplingParams()))
    async with asyncio.timeout(30):
        reason = await engine.wait_failed()
    assert "more than 2 times in 10 minutes" in reason
    assert "SIGKILL" in reason
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        submit(engine, [1], SamplingParams())


async def test_restarts_long_ago_are_forgiven(launch):
    engine = await launch(restarts=1, window_seconds=0.0)
    for _ in range(3):
        await collect(submit(engine, [scripted.DIE], SamplingParams()))
        await until(lambda: engine.ready)


async def test_a_restart_that_does_not_come_up_ends_in_failure_with_its_own_cause(launch):
    engine = await launch("once", restarts=2)
    await collect(submit(engine, [scripted.DIE], SamplingParams()))
    async with asyncio.timeout(30):
        assert "FileExistsError" in await engine.wait_failed()


async def test_totals_go_on_where_another_process_takes_over(launch):
    engine, metrics = await launch(), ServerMetrics()
    pool = EnginePool({}, Supervision(), COMMAND)
    pool.on_change = lambda: [metrics.watch_engine(name, client) for name, client in pool.items()]
    pool.adopt("llm", engine)
    place = '{model="llm",version="1"}'

    def shown(name):
        line = next(
            line
            for line in metrics.render().splitlines()
            if line.startswith(f"slipstream_{name}{place} ")
        )
        return float(line.rpartition(" ")[2])

    async def serve(client, finished):
        await collect(submit(client, [1], SamplingParams(max_tokens=5)))
        await until(lambda: shown("requests_finished_total") == finished)
        assert shown("steps_total") >= 5 * finished

    await serve(engine, 1)
    steps = shown("steps_total")
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: not engine.ready)
    assert (shown("requests_finished_total"), shown("steps_total"), shown("kv_blocks_free")) == (
        1,
        steps,
        0,
    )
    await until(lambda: engine.ready)
    await serve(engine, 2)
    another = await launch("another")
    assert pool.adopt("llm", another) is engine
    assert shown("requests_finished_total") == 2
    await serve(another, 3)
    assert shown("kv_blocks_free") == 128
    await serve(engine, 4)  # the one before still finishes what it has
    await pool.release(engine, 5.0)
    assert shown("requests_finished_total") == 4
    await serve(another, 5)


async def test_a_hung_step_is_noticed_its_stack_shown_and_the_process_replaced(launch, capfd):
    engine = await launch(silence_seconds=1.0)
    last = (await collect(submit(engine, [scripted.HANG], SamplingParams())))[1]
    assert last.error == "the engine process failed: no sign of life for 1 s while it had work"
    await until(lambda: engine.ready)
    errors = capfd.readouterr().err
    assert "_obey" in errors  # the stack names the function that hangs


async def test_a_stopped_process_is_noticed_too(launch):
    engine = await launch(silence_seconds=1.0)
    os.kill(engine.process_id, signal.SIGSTOP)
    assert (await collect(submit(engine, [1], SamplingParams())))[1].finish_reason == "error"
    await until(lambda: engine.ready)


async def test_slow_steps_are_not_mistaken_for_a_hang(launch):
    engine = await launch(silence_seconds=1.0)
    slow = SamplingParams(max_tokens=4, seed=400)
    assert (await collect(submit(engine, [1], slow)))[1].finish_reason == "length"
    assert not engine._restarts


async def test_an_engine_that_cannot_start_says_why_and_is_not_tried_again(launch):
    with pytest.raises(EngineStartFailed, match="ValueError: this engine folder is bad by order"):
        await launch("bad")


async def test_an_engine_that_never_gets_ready_is_given_up(launch):
    with pytest.raises(EngineStartFailed, match="not ready 1 s after its start"):
        await launch("slow", start_seconds=1.0, silence_seconds=1.0)


async def test_what_cannot_be_sent_leaves_nothing_that_looks_like_work(launch):
    engine = await launch()
    with pytest.raises(OverflowError):
        submit(engine, [1], SamplingParams(), priority=2**70)
    assert engine.outstanding == 0


async def test_draining_refuses_new_work_and_finishes_the_old(launch):
    engine = await launch()
    generation = submit(engine, [1], SamplingParams(max_tokens=30, seed=5))
    engine.begin_drain()
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="shutting down"):
        submit(engine, [1], SamplingParams())
    async with asyncio.timeout(30):
        await engine.wait_drained()
    assert (await collect(generation))[0] == list(range(2, 32))


async def test_stop_leaves_no_process_and_no_file(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = await launch()
    process_id = engine.process_id
    generation = submit(engine, [1], LONG)
    await engine.stop()
    assert (await collect(generation))[1].error == "the server is shutting down"
    assert not process_exists(process_id)
    assert list(tmp_path.glob("slipstream-*")) == []


def test_the_process_dies_with_its_parent_however_that_ends(tmp_path):
    parent = (
        "import asyncio, sys; from slipstream.server.engine_link.client import EngineClient\n"
        "async def main():\n"
        f"    engine = EngineClient({str(tmp_path / 'fine')!r}, command={COMMAND!r})\n"
        "    await engine.start(); print(engine.process_id, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        assert process_exists(child)
        process.kill()
    deadline = time.monotonic() + 30
    while process_exists(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process_exists(child)


def test_the_server_side_never_loads_torch():
    code = (
        "import sys, slipstream.server.engine_link.client, slipstream.server.engine_link.in_process, slipstream.engine_worker.cpu_probe;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
