"""The engine process under its supervisor: real processes that are killed, hang or fail."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import pytest
import scripted_engine as scripted
from submit import submit

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.client import EngineClient, EngineStartFailed, Supervision
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.engine_link.silence import (
    SILENT_SECONDS,
    EngineState,
    Responsiveness,
    Silence,
)
from slipstream.server.log.process_state import ProcessState, read_state
from slipstream.server.metrics.server_metrics import ServerMetrics

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
    tokens = []
    last = None
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


async def test_concurrent_requests_get_their_own_tokens_and_finish_once(launch):
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


async def test_unread_outputs_are_merged_into_one(launch):
    engine = await launch()
    generation = submit(engine, [1], SamplingParams(max_tokens=10))
    await until(lambda: generation.finished)
    delta = await anext(generation)
    assert delta.tokens == list(range(2, 12))
    assert delta.finish_reason == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_cancel_ends_only_its_request_with_the_given_reason(launch):
    engine = await launch()
    kept = submit(engine, [1], SamplingParams(max_tokens=50, seed=2))
    cancelled = submit(engine, [1], LONG)
    await anext(cancelled)
    cancelled.cancel("stop")
    assert (await collect(cancelled))[1].finish_reason == "stop"
    cancelled.cancel()  # no effect after the end
    assert (await collect(kept))[0] == list(range(2, 52))


async def test_garbage_collection_skips_objects_created_at_start(launch):
    engine = await launch()
    (frozen,), _ = await collect(submit(engine, [scripted.COUNT_FROZEN_OBJECTS], SamplingParams()))
    assert frozen > 10_000


async def test_request_refused_by_the_engine_ends_with_the_error(launch):
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
async def test_failed_process_fails_requests_in_flight_and_is_replaced(
    launch, order, reason, capfd
):
    engine = await launch()
    first = engine.process_id
    other = submit(engine, [1], LONG)
    await anext(other)
    failing = submit(engine, [order], SamplingParams())
    for generation in (other, failing):
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


async def test_engine_killed_while_idle_is_restarted(launch):
    engine = await launch()
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: not engine.ready)
    assert engine.failure == "killed by SIGKILL"
    await until(lambda: engine.ready)


async def test_too_many_restarts_are_a_failure(launch):
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


async def test_restarts_before_the_window_do_not_count(launch):
    engine = await launch(restarts=1, window_seconds=0.0)
    for _ in range(3):
        await collect(submit(engine, [scripted.DIE], SamplingParams()))
        await until(lambda: engine.ready)


async def test_failed_restart_is_reported_with_its_own_cause(launch):
    engine = await launch("once", restarts=2)
    await collect(submit(engine, [scripted.DIE], SamplingParams()))
    async with asyncio.timeout(30):
        assert "FileExistsError" in await engine.wait_failed()


async def test_counters_continue_when_another_process_takes_over(launch):
    engine = await launch()
    metrics = ServerMetrics()
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
    await serve(engine, 4)  # the previous engine finishes its requests
    await pool.release(engine, 5.0)
    assert shown("requests_finished_total") == 4
    await serve(another, 5)


async def test_nothing_keeps_an_engine_that_was_replaced(launch):
    pool = EnginePool({}, Supervision(), COMMAND)
    failed = asyncio.ensure_future(pool.wait_failed())
    engine = EngineClient("fine", command=COMMAND)
    await engine.start()
    pool.adopt("llm", engine)
    await collect(submit(engine, [1], SamplingParams(max_tokens=5)))
    pool.adopt("llm", await launch("another"))
    await pool.release(engine, 5.0)
    found = weakref.ref(engine)
    del engine
    await until(lambda: gc.collect() >= 0 and found() is None)
    assert not failed.done()
    failed.cancel()


async def test_an_engine_that_was_replaced_takes_requests_that_were_being_prepared(launch):
    pool = EnginePool({}, Supervision(), COMMAND)
    former = await launch()
    pool.adopt("llm", former)
    pool.adopt("llm", await launch("another"))
    released = asyncio.ensure_future(pool.release(former, 30.0, late_seconds=0.5))
    await asyncio.sleep(0)
    tokens, _ = await collect(submit(former, [1], SamplingParams(max_tokens=3)))
    assert tokens == [2, 3, 4]
    await released
    with pytest.raises(EngineUnavailable):
        submit(former, [1], SamplingParams(max_tokens=3))


async def test_the_failure_of_an_engine_that_was_replaced_is_not_that_of_its_successor(launch):
    pool = EnginePool({}, Supervision(), COMMAND)
    failed = asyncio.ensure_future(pool.wait_failed())
    former = await launch(restarts=0)
    pool.adopt("llm", former)
    # It fails after it was replaced, before it is released.
    pool.adopt("llm", successor := await launch("another", restarts=0))
    os.kill(former.process_id, signal.SIGKILL)
    await until(lambda: former.failure is not None and former.process_id is None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not failed.done()
    os.kill(successor.process_id, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert "SIGKILL" in await failed


async def test_process_with_a_hung_step_prints_its_stack_and_is_replaced(launch, capfd):
    engine = await launch(silence_seconds=1.0)
    last = (await collect(submit(engine, [scripted.HANG], SamplingParams())))[1]
    assert last.error == "the engine process failed: it sent no message for 1 s"
    await until(lambda: engine.ready)
    errors = capfd.readouterr().err
    assert "_obey" in errors  # the stack names the function that hangs


async def test_stopped_process_is_replaced(launch):
    engine = await launch(silence_seconds=1.0)
    os.kill(engine.process_id, signal.SIGSTOP)
    assert (await collect(submit(engine, [1], SamplingParams())))[1].finish_reason == "error"
    await until(lambda: engine.ready)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_stopped_process_is_not_ready_long_before_it_is_replaced(launch, busy):
    engine = await launch(silence_seconds=3600.0)
    running = submit(engine, [1], LONG) if busy else None
    os.kill(engine.process_id, signal.SIGSTOP)
    await until(lambda: not engine.ready)
    assert engine.failure is None
    os.kill(engine.process_id, signal.SIGCONT)
    await until(lambda: engine.ready)
    assert not engine._restarts
    if running is not None:
        running.cancel()


async def test_process_that_stops_while_idle_is_replaced(launch):
    engine = await launch(silence_seconds=1.0)
    first = engine.process_id
    os.kill(first, signal.SIGSTOP)
    await until(lambda: engine.ready and engine.process_id != first)


def test_silence_is_unusual_after_a_moment_or_twice_the_longest_step():
    silence = Silence(60.0)
    silence.count(SILENT_SECONDS, heard=False)
    assert not silence.unusual
    silence.count(3.0 - SILENT_SECONDS, heard=False)
    assert silence.unusual
    silence.count(0.25, heard=True)  # after three seconds
    assert not silence.unusual
    silence.count(5.9, heard=False)
    assert not silence.unusual
    silence.count(0.2, heard=False)
    assert silence.unusual
    silence.count(20.0, heard=False)
    silence.count(0.25, heard=True)
    silence.count(15.1, heard=False)  # never more than a quarter of the time until it is killed
    assert silence.unusual


def test_long_steps_are_forgotten():
    silence = Silence(60.0)
    silence.count(7.0, heard=False)
    for _ in range(4 * 3600):
        silence.count(0.25, heard=True)
    silence.count(1.5, heard=False)
    assert silence.unusual


def test_silence_of_a_process_that_computes_is_a_step():
    silence = Silence(60.0)
    for _ in range(53):
        silence.count(0.25, heard=False, computed=True)
    assert not silence.unusual
    for _ in range(5):  # it has stopped to compute: it waits for something
        silence.count(0.25, heard=False, explained=False)
    assert silence.unusual
    silence.count(0.25, heard=False, computed=True)
    assert not silence.unusual
    silence.count(0.25, heard=False, computed=True)  # 15.25 s, a quarter of the longest
    silence.count(0.25, heard=False, computed=True)
    assert silence.unusual


def test_silence_of_a_process_that_computes_without_requests_is_a_hang():
    silence = Silence(60.0)
    for _ in range(5):  # 1.25 s
        silence.count(0.25, heard=False, computed=True, in_step=False)
    assert silence.unusual
    silence.count(0.25, heard=False, computed=True, in_step=True)  # a request has come
    assert not silence.unusual


async def test_an_idle_process_that_spins_is_not_ready_long_before_it_is_replaced(launch):
    engine = await launch("spin")
    await until(lambda: not engine.ready)
    assert engine.failure is None
    assert not engine._restarts


@pytest.mark.slow
async def test_a_stopped_process_is_not_ready_within_two_seconds(launch):
    engine = await launch(silence_seconds=3600.0)
    begun = time.monotonic()
    os.kill(engine.process_id, signal.SIGSTOP)
    await until(lambda: not engine.ready)
    assert time.monotonic() - begun < 2.0


@pytest.mark.slow
async def test_a_request_of_a_killed_process_has_the_reason_within_a_second(launch):
    engine = await launch()
    running = submit(engine, [1], LONG)
    await anext(aiter(running))
    begun = time.monotonic()
    os.kill(engine.process_id, signal.SIGKILL)
    _, last = await collect(running)
    assert "SIGKILL" in last.error
    assert time.monotonic() - begun < 1.0


def test_silence_without_a_step_is_unusual_after_a_moment_whatever_was_before():
    silence = Silence(60.0)
    silence.count(12.0, heard=False)
    silence.count(0.25, heard=True)
    silence.count(1.25, heard=False, explained=False)  # on a CPU, or without requests
    assert silence.unusual
    silence.count(0.0, heard=False, explained=True)  # a GPU may compute
    assert not silence.unusual


def respond(responsiveness, state, ticks, busy=False, heard=True):
    for _ in range(ticks):
        responsiveness.heard = heard
        responsiveness.note_state(state, 0.25)
        responsiveness.count_silence(0.25, busy=busy, on_cpu=True)


def test_an_idle_engine_with_a_stopped_rank_does_not_respond_and_is_to_be_killed_soon():
    responsiveness = Responsiveness(60.0)
    respond(responsiveness, EngineState(), 100)
    assert responsiveness.responds
    stopped = EngineState(stopped="rank 1")
    respond(responsiveness, stopped, 1)  # rank 0 still sends its messages
    assert not responsiveness.responds
    respond(responsiveness, stopped, 38)
    assert responsiveness.find_hang() == ""
    respond(responsiveness, EngineState(), 1)
    assert responsiveness.responds
    respond(responsiveness, stopped, 40)
    assert responsiveness.find_hang() == "rank 1 has been stopped by a signal for 10 s"


def test_the_patience_with_a_stopped_process_is_at_most_that_of_the_watchdog():
    responsiveness = Responsiveness(4.0)
    respond(responsiveness, EngineState(stopped="rank 1"), 16)
    assert responsiveness.find_hang() == "rank 1 has been stopped by a signal for 4 s"
    silent = Responsiveness(4.0)
    respond(silent, EngineState(stopped="it"), 16, heard=False)
    assert silent.find_hang() == "it sent no message for 4 s: it has been stopped by a signal"


def test_processor_time_that_grows_explains_the_silence_of_a_busy_engine():
    responsiveness = Responsiveness(60.0)
    for tick in range(40):
        state = EngineState(cpu_seconds=0.2 * tick)
        respond(responsiveness, state, 1, busy=True, heard=False)
    assert responsiveness.responds
    respond(responsiveness, state, 5, busy=True, heard=False)
    assert not responsiveness.responds
    # of ranks on other machines it is not known, so the engine may be in a long step
    remote = Responsiveness(60.0)
    respond(remote, EngineState(cpu_seconds=None), 20, busy=True, heard=False)
    respond(remote, EngineState(cpu_seconds=None), 1, busy=True)
    respond(remote, EngineState(cpu_seconds=None), 19, busy=True, heard=False)
    assert remote.responds
    respond(remote, EngineState(cpu_seconds=None), 1, busy=False, heard=False)
    assert not remote.responds


def test_the_state_of_a_process_tells_that_a_signal_has_stopped_it():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while read_state(process.pid).cpu_seconds == 0.0:
            time.sleep(0.01)
        assert not read_state(process.pid).stopped
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert read_state(process.pid).stopped
    finally:
        process.kill()
        process.wait()
    assert read_state(process.pid) == ProcessState()


async def test_process_with_slow_steps_is_not_replaced(launch):
    engine = await launch(silence_seconds=1.0)
    slow = SamplingParams(max_tokens=4, seed=400)
    assert (await collect(submit(engine, [1], slow)))[1].finish_reason == "length"
    assert not engine._restarts


async def test_engine_that_cannot_start_raises_the_reason(launch):
    with pytest.raises(EngineStartFailed, match="ValueError: this engine folder is bad by order"):
        await launch("bad")


async def test_engine_that_is_not_ready_in_time_raises_an_error(launch):
    with pytest.raises(EngineStartFailed, match="not ready 1 s after its start"):
        await launch("slow", start_seconds=1.0, silence_seconds=1.0)


async def test_request_that_cannot_be_sent_is_not_outstanding(launch):
    engine = await launch()
    with pytest.raises(OverflowError):
        submit(engine, [1], SamplingParams(), priority=2**70)
    assert engine.outstanding == 0


async def test_draining_refuses_new_requests_and_finishes_admitted_ones(launch):
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


def test_engine_process_ends_when_its_parent_is_killed(tmp_path):
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


def test_the_server_side_does_not_import_torch():
    code = (
        "import sys, slipstream.server.engine_link.client, slipstream.server.engine_link.in_process, slipstream.engine_worker.cpu_probe;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
