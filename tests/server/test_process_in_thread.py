"""The in-process engine has the same interface as an engine process."""

import asyncio
import threading
import time

import pytest
import scripted_engine as scripted
from submit import submit

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.in_process import InProcessEngine


@pytest.fixture
def loop():
    return scripted.ScriptedLoop()


@pytest.fixture
def engine(loop):
    engine = InProcessEngine(loop)
    yield engine
    engine.close()


async def collect(generation):
    tokens = []
    last = None
    async with asyncio.timeout(30):
        async for last in generation:
            tokens += last.tokens
    return tokens, last


async def test_requests_get_their_tokens(engine):
    assert engine.ready
    results = await asyncio.gather(
        *(collect(submit(engine, [n], SamplingParams(max_tokens=15))) for n in (1, 50, 100))
    )
    assert [tokens for tokens, _ in results] == [list(range(n + 1, n + 16)) for n in (1, 50, 100)]
    assert {last.finish_reason for _, last in results} == {"length"}


async def test_cancelled_request_finishes_as_cancelled(engine):
    generation = submit(engine, [1], SamplingParams(max_tokens=10**6, seed=1))
    await anext(generation)
    generation.cancel()
    assert (await collect(generation))[1].finish_reason == "cancelled"


def test_one_engine_serves_one_event_loop_after_another(engine):
    for start in (1, 2, 3):
        tokens, _ = asyncio.run(_one(engine, start))
        assert tokens == [start + 1, start + 2, start + 3]


async def _one(engine, start):
    return await collect(submit(engine, [start], SamplingParams(max_tokens=3)))


def test_requests_of_a_closed_event_loop_are_cancelled(engine, loop):
    async def submit_and_return():
        submit(engine, [1], SamplingParams(max_tokens=10**6, seed=1))

    asyncio.run(submit_and_return())
    deadline = time.monotonic() + 30
    while (loop.cancelled == 0 or loop.running) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (loop.cancelled, len(loop.running), engine.outstanding) == (1, 0, 0)


async def test_an_idle_engine_waits_for_messages_and_runs_no_steps(engine, loop, monkeypatch):
    waits = []
    wait = engine._link.wait
    monkeypatch.setattr(
        engine._link, "wait", lambda seconds: waits.append(seconds) or wait(seconds)
    )
    await collect(submit(engine, [1], SamplingParams(max_tokens=3)))
    async with asyncio.timeout(30):
        while not waits or waits[-1] is not None:  # None waits without a limit
            await asyncio.sleep(0.01)
    steps = loop.steps
    count = len(waits)
    await asyncio.sleep(0.1)
    assert (loop.steps, len(waits)) == (steps, count)


async def test_failed_step_fails_all_requests_with_the_reason_and_refuses_new_ones(engine, capfd):
    other = submit(engine, [1], SamplingParams(max_tokens=10**6, seed=1))
    await anext(other)
    failing = submit(engine, [scripted.RAISE], SamplingParams())
    for generation in (other, failing):
        last = (await collect(generation))[1]
        assert last.error == "the engine failed: RuntimeError: raised by order"
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="raised by order"):
        submit(engine, [1], SamplingParams())
    assert "Traceback" in capfd.readouterr().err


async def test_close_fails_requests_in_flight_and_ends_the_thread(loop):
    others = threading.enumerate()
    engine = InProcessEngine(loop)
    assert [thread.name for thread in threading.enumerate() if thread not in others] == ["engine"]
    generation = submit(engine, [1], SamplingParams(max_tokens=10**6, seed=1))
    await anext(generation)
    engine.close()
    assert (await collect(generation))[1].finish_reason == "error"
    assert all(thread in others for thread in threading.enumerate())
