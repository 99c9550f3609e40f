"""An engine whose rank 1 is on another "machine": its tokens are those of one rank."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_rank_host import HEARTBEAT_SECONDS, HostProcess, options_of
from submit import submit
from tiny_adapters import save_adapter
from tiny_engine import build_tiny_engine
from tiny_server import children_of, wait_for

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.client import EngineClient, Supervision
from slipstream.server.engine_link.cluster.leader import RankHosts

SUPPORT = Path(__file__).parents[1] / "support"
ONE = EngineSettings(
    dtype="float32", device="cpu", cache_tokens=1024, max_rows=8, threads=1, adapter_max_rank=16
)
TWO = EngineSettings(**{**ONE.to_json(), "ranks": 2})


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """Build an engine, with an adapter beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("cluster")
    engine = build_tiny_engine(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    save_adapter(model, folder / "adapter", rank=4)
    return engine


@pytest.fixture(scope="module")
def hosts() -> Iterator[RankHosts]:
    opened = RankHosts(options_of(0, 0), HEARTBEAT_SECONDS)
    yield opened
    opened.close()


async def read_all(client: EngineClient, **fields) -> list[int]:
    found: list[int] = []
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    async for output in submit(client, [5, 6, 7], sampling, **fields):
        found += output.tokens
    return found


async def read_answers(client: EngineClient, engine: Path) -> list[list[int]]:
    source = AdapterSource(folder=str(engine.parent / "adapter"))
    plain = [read_all(client) for _ in range(2)]
    return await asyncio.gather(*plain, read_all(client, adapter=1, adapter_source=source))


async def test_the_tokens_of_two_machines_are_those_of_one_rank(hosts, engine, tmp_path):
    host = HostProcess(hosts.port, tmp_path / "log")
    alone = EngineClient(engine, ONE)
    client = EngineClient(engine, TWO, hosts=hosts)
    async with asyncio.timeout(90):
        await alone.start()
        expected = await read_answers(alone, engine)
        await alone.stop()
        await client.start()
        assert client.info is not None
        assert client.info.ranks == 2
        assert await read_answers(client, engine) == expected
        # The ranks have compared their digests: without work, a difference ends the engine.
        assert await read_answers(client, engine) == expected
        await client.stop()
    assert expected[0] == expected[1] != expected[2]
    wait_for(lambda: not children_of(host.process.pid))
    host.close()


async def test_a_token_that_differs_on_another_machine_ends_the_engine(hosts, engine, tmp_path):
    flipping = (sys.executable, str(SUPPORT / "flipping_engine.py"))
    host = HostProcess(hosts.port, tmp_path / "log", *flipping)
    client = EngineClient(engine, TWO, Supervision(restarts=0), hosts=hosts)
    async with asyncio.timeout(90):
        await client.start()
        # rows 0 to 2 run, so that the flipped row is compared
        await asyncio.gather(*(read_all(client) for _ in range(3)))
        reason = await client.wait_failed()
        await client.stop()
    host.close()
    assert "RankFailed: rank 1 holds other tokens than rank 0 (row 2)" in reason


@pytest.mark.slow
async def test_the_stacks_of_a_stopped_rank_are_in_the_log_of_its_host(
    hosts, engine, tmp_path, capfd
):
    host = HostProcess(hosts.port, tmp_path / "log")
    client = EngineClient(engine, TWO, Supervision(silence_seconds=1.0), hosts=hosts)
    async with asyncio.timeout(90):
        await client.start()
        expected = await read_all(client)
        os.kill(children_of(host.process.pid)[0], signal.SIGSTOP)
        await read_all(client)
        while not client.ready:
            await asyncio.sleep(0.05)
        assert await read_all(client) == expected
        await client.stop()
    assert "all_reduce" in capfd.readouterr().err  # rank 0 waits for rank 1
    assert "in follow" in host.log()
    host.close()
