"""Several engine processes behind one engine: real processes of the scripted engine."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_engine as scripted
from submit import submit

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.messages import EngineInfo, EngineStats
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.client import (
    EngineClient,
    EngineStartFailed,
    Supervision,
    request_ids,
)
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.linked import LinkedEngine
from slipstream.server.engine_link.memory_table import titled_replicas
from slipstream.server.engine_link.replicas import LinkedReplicas, Replicas

COMMAND = (sys.executable, str(Path(scripted.__file__)))
LONG = SamplingParams(max_tokens=100_000, seed=5)
INFO = scripted.ScriptedLoop().info


def create(folder, count=2, frontends=1, **supervision):
    ids = request_ids()
    return Replicas(
        [
            EngineClient(
                folder,
                EngineSettings(replicas=count, replica=index),
                supervision=Supervision(**supervision),
                command=COMMAND,
                frontends=frontends,
                ids=ids,
                replica=index,
            )
            for index in range(count)
        ]
    )


@pytest.fixture
async def launch(tmp_path):
    started = []

    async def start(name="fine", count=2, **options):
        replicas = create(tmp_path / name, count, **options)
        started.append(replicas)
        async with asyncio.timeout(30):
            await replicas.start()
        return replicas

    yield start
    for replicas in started:
        await replicas.stop()


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


def prompt_of(number, blocks=2):
    """Return a prompt with a beginning of its own."""
    return [number, *range(1, blocks * 32)]


async def test_streams_are_shared_equally_and_statistics_are_sums(launch):
    replicas = await launch()
    assert replicas.ready
    streams = [submit(replicas, prompt_of(number), LONG) for number in range(64)]
    for stream in streams:
        await anext(stream)
    loads = [client.outstanding for client in replicas.clients]
    assert sum(loads) == replicas.outstanding == 64
    assert max(loads) <= 1.1 * min(loads)
    assert len({stream.request_id for stream in streams}) == 64
    await until(lambda: replicas.stats.running == 64)
    assert [client.stats.running for client in replicas.clients] == loads
    for stream in streams:
        stream.cancel()
    ends = await asyncio.gather(*map(collect, streams))
    assert {last.finish_reason for _, last in ends} == {"cancelled"}
    await until(lambda: replicas.stats.cancelled == 64)
    assert replicas.stats.total_blocks == 256
    assert replicas.stats.steps == sum(client.stats.steps for client in replicas.clients)
    assert replicas.info == replace(INFO, max_rows=128, total_blocks=256)


async def test_a_dead_replica_fails_its_own_streams_only_and_comes_back(launch):
    replicas = await launch()
    streams = [submit(replicas, prompt_of(number), LONG) for number in range(16)]
    for stream in streams:
        await anext(stream)
    victim, other = replicas.clients
    lost = [stream for stream in streams if victim.has(stream.request_id)]
    kept = [stream for stream in streams if other.has(stream.request_id)]
    assert len(lost) == len(kept) == 8
    former = victim.process_id
    os.kill(former, signal.SIGKILL)
    for stream in lost:
        _, last = await collect(stream)
        assert last.lost
        assert last.error == "the engine process failed: killed by SIGKILL"
        assert replicas.ready
    # while it restarts, and after
    restarting = [
        submit(replicas, prompt_of(100 + number), SamplingParams(max_tokens=3))
        for number in range(8)
    ]
    assert all(other.has(one.request_id) for one in restarting)
    for tokens, last in await asyncio.gather(*map(collect, restarting)):
        assert (len(tokens), last.finish_reason) == (3, "length")
    await until(lambda: victim.ready)
    assert victim.process_id != former
    again = [submit(replicas, prompt_of(200 + number), LONG) for number in range(8)]
    assert all(victim.has(one.request_id) for one in again)  # it has no load
    for stream in [*kept, *again]:
        await anext(stream)
        stream.cancel()
        assert (await collect(stream))[1].finish_reason == "cancelled"
    await until(lambda: replicas.stats.finished == 8)


async def test_no_request_is_refused_while_a_replica_dies(launch):
    replicas = await launch()
    victim = replicas.clients[0]
    submitted = []
    for number in range(400):
        submitted.append(submit(replicas, prompt_of(number, 1), SamplingParams(max_tokens=2)))
        if number == 100:
            os.kill(victim.process_id, signal.SIGKILL)
        await asyncio.sleep(0.002)
    ends = [last for _, last in await asyncio.gather(*map(collect, submitted))]
    failed = [last for last in ends if last.finish_reason != "length"]
    assert {last.lost for last in failed} <= {True}
    assert len(failed) < 100  # those that the process had not finished
    assert victim.processes == 2 or not victim.ready


async def test_a_prompt_goes_where_its_beginning_was_sent(launch):
    replicas = await launch()
    one = SamplingParams(max_tokens=1)
    placed = {}
    for number in range(6):
        stream = submit(replicas, prompt_of(number, 4), LONG)
        await anext(stream)
        placed[number] = [client.has(stream.request_id) for client in replicas.clients]
    assert [place[0] for place in placed.values()] == [True, False] * 3
    for number, place in placed.items():
        longer = submit(replicas, [*prompt_of(number, 4), *[77] * 100], LONG)
        assert [client.has(longer.request_id) for client in replicas.clients] == place
        other_tenant = submit(replicas, prompt_of(number, 4), one, cache_salt=f"tenant {number}")
        loads = [client.outstanding for client in replicas.clients]
        chosen = [client.has(other_tenant.request_id) for client in replicas.clients]
        assert loads[chosen.index(True)] <= 1 + min(loads)


async def test_the_output_of_a_request_counts_as_sent(launch):
    """A short question with a long answer: the next turn begins with both."""
    replicas = await launch()
    busy = submit(replicas, prompt_of(5), LONG)
    assert replicas.clients[0].has(busy.request_id)
    question = [1, 2, 3]
    answer, _ = await collect(submit(replicas, question, SamplingParams(max_tokens=200)))
    for number in range(10, 13):
        submit(replicas, prompt_of(number), LONG)
    assert [client.outstanding for client in replicas.clients] == [2, 2]
    follow_up = submit(replicas, [*question, *answer, 9, 9], LONG)
    assert replicas.clients[1].has(follow_up.request_id)


async def test_sequences_of_one_prompt_stay_together(launch):
    replicas = await launch()
    for number in range(4):
        leader = submit(replicas, prompt_of(number, 0), LONG)
        home = next(client for client in replicas.clients if client.has(leader.request_id))
        for _ in range(5):
            shared = submit(
                replicas, prompt_of(number, 0), LONG, shares_prompt_with=leader.request_id
            )
            assert home.has(shared.request_id)


async def test_an_adapter_named_by_its_number_goes_to_a_replica_that_was_sent_it(launch):
    replicas = await launch()
    source = AdapterSource(folder="somewhere")
    one = SamplingParams(max_tokens=1)

    async def run(adapter, source=None):
        fields = {"adapter": adapter, "adapter_name": f"LoRA task {adapter}"}
        return (await collect(submit(replicas, [1], one, adapter_source=source, **fields)))[1]

    assert (await run(5)).error == "LoRA task 5 not found in cache"
    busy = [submit(replicas, [2], LONG)]
    first, second = sorted(replicas.clients, key=lambda client: -client.outstanding)
    await run(5, source)  # to the second, which has less to do
    assert [first.outstanding, second.outstanding] == [1, 0]
    busy += [submit(replicas, [3, number], LONG, adapter=5) for number in range(4)]
    assert [first.outstanding, second.outstanding] == [1, 4]
    for _ in range(5):
        assert (await run(5)).finish_reason == "length"
    os.kill(second.process_id, signal.SIGKILL)
    await until(lambda: not second.ready)
    assert (await run(5)).error == "LoRA task 5 not found in cache"
    await until(lambda: second.processes == 2)
    assert (await run(5)).error == "LoRA task 5 not found in cache"
    await run(5, source)
    assert (await run(5)).finish_reason == "length"


async def test_a_start_that_fails_says_which_replica_and_leaves_no_process(tmp_path):
    replicas = create(tmp_path / "once")
    with pytest.raises(EngineStartFailed, match=r"^replica [01]: .*once"):
        async with asyncio.timeout(30):
            await replicas.start()
    assert replicas.info is None
    processes = [client.process_id for client in replicas.clients]
    await replicas.stop()
    assert [client.process_id for client in replicas.clients] == [None, None]
    for process in filter(None, processes):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


async def test_only_the_last_replica_that_fails_for_good_ends_the_server(launch, caplog):
    replicas = await launch(restarts=0)
    failed = asyncio.ensure_future(replicas.wait_failed())
    first, second = replicas.clients
    os.kill(first.process_id, signal.SIGKILL)
    await until(lambda: "replica 0 failed for good, 1 of 2 go on" in caplog.text)
    assert replicas.ready
    assert not failed.done()
    tokens, _ = await collect(submit(replicas, [7], SamplingParams(max_tokens=2)))
    assert tokens == [8, 9]
    os.kill(second.process_id, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert "killed by SIGKILL" in await failed
    assert not replicas.ready
    with pytest.raises(EngineUnavailable, match=r"^the engine is not running: killed by SIGKILL$"):
        submit(replicas, [7], LONG)


async def test_draining_refuses_new_requests_and_finishes_the_others(launch):
    replicas = await launch()
    streams = [submit(replicas, [number], SamplingParams(max_tokens=20)) for number in range(8)]
    replicas.begin_drain()
    with pytest.raises(EngineUnavailable, match=r"^the server is shutting down$"):
        submit(replicas, [1], LONG)
    async with asyncio.timeout(30):
        await replicas.wait_drained()
    for tokens, last in await asyncio.gather(*map(collect, streams)):
        assert (len(tokens), last.finish_reason) == (20, "length")


async def test_counters_continue_those_of_the_engine_before(launch):
    former = await launch()
    await asyncio.gather(
        *(collect(submit(former, [number], SamplingParams(max_tokens=2))) for number in range(6))
    )
    await until(lambda: former.stats.finished == 6)
    replicas = await launch(count=3)
    replicas.continue_counters_of(former)
    await collect(submit(replicas, [1], SamplingParams(max_tokens=2)))
    await until(lambda: replicas.stats.finished == 7)
    await former.stop()
    former.mark_ended()
    assert former.info is None
    assert replicas.stats.finished == 7


async def test_front_ends_share_replicas_and_see_each_others_load(launch):
    replicas = await launch(frontends=2)
    ids = request_ids(1)
    links = [LinkedEngine(1, ids) for _ in replicas.clients]
    for link, client in zip(links, replicas.clients, strict=True):
        link.attach(client.link_path(1))
        async with asyncio.timeout(30):
            await link.wait_serving()
    secondary = LinkedReplicas(links, lambda index: replicas.clients[index].outstanding)
    replicas.count_with(lambda client: links[replicas.clients.index(client)].outstanding)
    assert secondary.info == replicas.info
    assert secondary.ready
    streams = []
    for number in range(32):
        engine = (replicas, secondary)[number % 2]
        streams.append(submit(engine, prompt_of(number), LONG))
    both = [
        client.outstanding + link.outstanding
        for client, link in zip(replicas.clients, links, strict=True)
    ]
    assert both == [16, 16]
    assert len({stream.request_id for stream in streams}) == 32
    await until(lambda: replicas.stats.running == 32)
    links[0].lose("it died")
    assert secondary.ready
    assert links[1].has(submit(secondary, [1], LONG).request_id)
    for link in links:
        link.close()
    assert not secondary.ready


def test_sizes_of_replicas_add_up_where_they_are_capacities():
    one = replace(INFO, weight_bytes=10, cache_bytes=20, load_seconds=3.0, step_tokens=512)
    other = replace(one, load_seconds=5.0, max_sequence_tokens=1000, max_rows=8, step_tokens=256)
    both = EngineInfo.of_replicas([one, other])
    assert both == replace(
        one,
        max_rows=72,
        total_blocks=256,
        weight_bytes=20,
        cache_bytes=40,
        load_seconds=5.0,
        max_sequence_tokens=1000,
        step_tokens=256,
    )
    assert EngineInfo.of_replicas([one]) == one


def test_statistics_of_replicas_are_sums():
    one = EngineStats(timestamp_us=5, running=3, free_blocks=7, steps=2, queue_seconds=0.5)
    other = replace(one, timestamp_us=9, running=4, queue_counts=[1] * 12)
    assert EngineStats.of_replicas([one, other]) == EngineStats(
        timestamp_us=9,
        running=7,
        free_blocks=14,
        steps=4,
        queue_seconds=1.0,
        queue_counts=[1] * 12,
    )


def test_the_memory_of_equal_replicas_is_one_table():
    one = replace(INFO, load_seconds=1.0)
    slower = replace(INFO, load_seconds=2.0)
    other = replace(INFO, device="cuda:1")
    assert titled_replicas("m", [one]) == [("m", one)]
    assert titled_replicas("m", [one, slower]) == [("m, each of 2 replicas", slower)]
    assert titled_replicas("m", [one, other]) == [("m replica 0", one), ("m replica 1", other)]
