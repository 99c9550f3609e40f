"""One engine process with links to several front ends of a server: real processes and sockets."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import scripted_engine as scripted
from hypothesis import given
from hypothesis import strategies as st
from submit import submit

from slipstream.engine.messages import FRONTEND_SHIFT, Cancel, Shutdown, StepOutputs
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.client import EngineClient, Supervision
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.linked import LinkedEngine
from slipstream.server.engine_link.split import OutputSplitter

COMMAND = (sys.executable, str(Path(scripted.__file__)))
LONG = SamplingParams(max_tokens=100_000, seed=5)

# A front end in its own process: it starts requests that do not end, and prints when they run.
FRONT_END = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from submit import submit
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.linked import LinkedEngine
async def main():
    engine = LinkedEngine(2)
    engine.attach(sys.argv[1])
    await engine.wait_serving()
    requests = [submit(engine, [1], SamplingParams(max_tokens=100_000, seed=5)) for _ in range(5)]
    for request in requests:
        await anext(request)
    print(requests[0].request_id, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


class FrontEnds:
    """A primary front end and two others, as `engines`, all in this process."""

    def __init__(self, folder, **supervision):
        self.primary = EngineClient(
            folder, supervision=Supervision(**supervision), command=COMMAND, frontends=3
        )
        self.others = [LinkedEngine(1), LinkedEngine(2)]
        self.engines = [self.primary, *self.others]
        self.lost = []
        self.primary.on_serving = self.attach
        self.primary.on_lost = self.lose

    def attach(self):
        for index, engine in enumerate(self.others, 1):
            engine.attach(self.primary.link_path(index))

    def lose(self, reason):
        self.lost.append(reason)
        for engine in self.others:
            engine.lose(reason)

    async def start(self):
        async with asyncio.timeout(30):
            await self.primary.start()
            for engine in self.others:
                await engine.wait_serving()

    async def stop(self):
        await self.primary.stop()
        for engine in self.others:
            engine.close()


@pytest.fixture
async def launch(tmp_path):
    started = []

    async def start(name="fine", **supervision):
        front_ends = FrontEnds(tmp_path / name, **supervision)
        started.append(front_ends)
        await front_ends.start()
        return front_ends

    yield start
    for front_ends in started:
        await front_ends.stop()


async def collect(generation):
    tokens = []
    last = None
    async with asyncio.timeout(60):
        async for last in generation:
            tokens += last.tokens
    return tokens, last


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_each_front_end_gets_all_tokens_of_its_own_requests_in_order(launch):
    front_ends = await launch()
    assert [engine.ready for engine in front_ends.engines] == [True] * 3
    assert {engine.info for engine in front_ends.engines} == {front_ends.primary.info}
    generations = []
    for number in range(300):
        engine = front_ends.engines[number % 3]
        tokens = 1 + number % 40
        generations.append((number, submit(engine, [number], SamplingParams(max_tokens=tokens))))
    results = await asyncio.gather(*(collect(generation) for _, generation in generations))
    for (number, generation), (tokens, last) in zip(generations, results, strict=True):
        assert tokens == list(range(number + 1, number + 2 + number % 40))
        assert last.finish_reason == "length"
        assert generation.request_id >> FRONTEND_SHIFT == number % 3
    assert len({generation.request_id for _, generation in generations}) == 300
    assert [engine.outstanding for engine in front_ends.engines] == [0, 0, 0]
    await until(lambda: front_ends.primary.stats.finished == 300)


async def test_cancel_ends_only_the_request_of_its_front_end(launch):
    front_ends = await launch()
    long = [submit(engine, [1], LONG) for engine in front_ends.engines]
    for generation in long:
        await anext(generation)
    long[1].cancel("stop")
    assert (await collect(long[1]))[1].finish_reason == "stop"
    for generation in (long[0], long[2]):
        await anext(generation)
    await until(lambda: front_ends.primary.stats.running == 2)


async def test_secondary_cannot_stop_the_engine_or_cancel_requests_of_others(launch, capfd):
    front_ends = await launch()
    generation = submit(front_ends.primary, [1], SamplingParams(max_tokens=20, seed=20))
    link = front_ends.others[0]._link
    link.send(Shutdown())
    link.send(Cancel([generation.request_id]))
    assert (await collect(generation))[1].finish_reason == "length"
    errors = capfd.readouterr().err
    assert "a message of front end 1 is ignored: unexpected kind of message" in errors
    assert "belongs to another front end" in errors


async def test_killed_front_end_harms_no_other_and_its_successor_is_served(launch, tmp_path):
    front_ends = await launch()
    primary, kept, replaced = front_ends.engines
    replaced.close()
    primary.drop_frontend(2)
    other = submit(kept, [1], LONG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FRONT_END, primary.link_path(2), str(Path(__file__).parents[1])),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    async with asyncio.timeout(30):
        first_id = int(await process.stdout.readline())
    assert first_id >> FRONTEND_SHIFT == 2
    await until(lambda: primary.stats.running == 6)
    old_path = primary.link_path(2)
    process.kill()
    await process.wait()
    primary.drop_frontend(2)
    await until(lambda: primary.stats.running == 1)
    assert primary.link_path(2) != old_path
    successor = LinkedEngine(2)
    front_ends.others[1] = successor
    successor.attach(primary.link_path(2))
    async with asyncio.timeout(30):
        await successor.wait_serving()
    generation = submit(successor, [7], SamplingParams(max_tokens=3))
    assert generation.request_id > first_id + 5  # ids of the dead process are not used again
    assert (await collect(generation))[0] == [8, 9, 10]
    assert (await anext(other)).finish_reason == ""
    assert front_ends.lost == []


async def test_failed_engine_fails_the_requests_of_all_front_ends_and_serves_them_again(launch):
    front_ends = await launch()
    long = [submit(engine, [1], LONG) for engine in front_ends.engines]
    for generation in long:
        await anext(generation)
    failing = submit(front_ends.others[0], [scripted.DIE], SamplingParams())
    for generation in (*long, failing):
        last = (await collect(generation))[1]
        assert last.error == "the engine process failed: killed by SIGKILL"
        assert last.lost
    assert front_ends.lost == ["killed by SIGKILL"]
    with pytest.raises(EngineUnavailable, match="the engine is not running: killed by SIGKILL"):
        submit(front_ends.others[1], [1], SamplingParams())
    await until(lambda: all(engine.ready for engine in front_ends.engines))
    for engine in front_ends.engines:
        assert (await collect(submit(engine, [5], SamplingParams(max_tokens=2))))[0] == [6, 7]


async def test_engine_that_hangs_with_the_work_of_a_secondary_is_replaced(launch):
    front_ends = await launch(silence_seconds=1.0)
    last = (await collect(submit(front_ends.others[1], [scripted.HANG], SamplingParams())))[1]
    assert last.error == "the engine process failed: it sent no message for 1 s"
    await until(lambda: all(engine.ready for engine in front_ends.engines))


async def test_engine_that_stopped_while_idle_is_replaced(launch):
    front_ends = await launch(silence_seconds=1.0)
    os.kill(front_ends.primary.process_id, signal.SIGSTOP)
    generation = submit(front_ends.others[0], [1], SamplingParams())
    assert (await collect(generation))[1].finish_reason == "error"
    await until(lambda: all(engine.ready for engine in front_ends.engines))


async def test_draining_secondary_refuses_new_requests_and_finishes_admitted_ones(launch):
    front_ends = await launch()
    engine = front_ends.others[0]
    generation = submit(engine, [1], SamplingParams(max_tokens=30, seed=5))
    engine.begin_drain()
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="shutting down"):
        submit(engine, [1], SamplingParams())
    async with asyncio.timeout(30):
        await engine.wait_drained()
    assert (await collect(generation))[0] == list(range(2, 32))


async def test_served_front_ends_leave_no_socket_in_the_file_system(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    front_ends = await launch()
    assert list(tmp_path.glob("slipstream-*")) == []
    front_ends.primary.drop_frontend(2)
    assert len(list(tmp_path.glob("slipstream-*"))) == 1  # waits for the successor
    await front_ends.stop()
    assert list(tmp_path.glob("slipstream-*")) == []


rows = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
    max_size=12,
)


@given(rows, st.booleans())
def test_split_outputs_are_the_rows_of_each_front_end(rows, with_log_probs):
    outputs = StepOutputs()
    expected = {}
    for number, (owner, tokens, failed) in enumerate(rows):
        request_id = (owner << FRONTEND_SHIFT) + number
        one = expected.setdefault(owner, StepOutputs())
        for target in (outputs, one):
            target.request_ids.append(request_id)
            target.token_counts.append(len(tokens))
            target.finish_reasons.append("error" if failed else "")
            target.cached_tokens.append(number)
            target.tokens += tokens
            if with_log_probs:
                target.log_probs += [-float(token) for token in tokens]
            if failed:
                target.errors[request_id] = "broken"
    splitter = OutputSplitter()
    for _ in range(2):  # the second time with the rows of the step before
        assert dict(splitter.split(outputs)) == expected
