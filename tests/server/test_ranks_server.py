"""A server whose engine has two ranks: answers, the end of a rank, the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_server import RealServer, limit_cache
from submit import submit
from tiny_engine import build_tiny_engine
from tiny_server import children_of, command_of, is_running, wait_for

from slipstream.engine.plan import StepPlan
from slipstream.engine.ranks.orders import AdapterHere, DigestRequest, Leave
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.llm import LLM
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.client import EngineClient, Supervision
from slipstream.server.engine_link.link import LinkError
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.engine_link.rank_link import decode_order, encode_order
from slipstream.weights.engine_config import read_engine_config

SUPPORT = Path(__file__).parents[1] / "support"
MODEL = "tiny"
SETTINGS = EngineSettings(
    dtype="float32", device="cpu", cache_tokens=1024, max_rows=8, threads=1, ranks=2
)
PROMPT = "5 6 7"
PENALTY = {"repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected(engine) -> str:
    """Return the answer of one rank."""
    with LLM(engine, "float32", device="cpu", cache_tokens=1024, threads=1) as llm:
        return llm.generate(PROMPT, max_tokens=24, ignore_end=True, **PENALTY)[0].text


def start_server(folder: Path, engine: Path, *flags: str) -> RealServer:
    write_repository(folder / "repository", MODEL, engine, engine, 64)
    limit_cache(folder / "repository", 4096)
    program = ("-m", "slipstream.cli.main", "start", "--repo", str(folder / "repository"))
    settings = ("--dtype", "float32", "--device", "cpu", "--ranks", "2")
    return RealServer(folder / "repository", folder / "log", *program, *settings, *flags).wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine) -> Iterator[RealServer]:
    running = start_server(tmp_path_factory.mktemp("served"), engine, "--frontends", "1")
    yield running
    running.close()


def engine_processes(server: RealServer) -> list[int]:
    """Return the processes of the engine, by rank."""
    found = {}
    for child in children_of(server.process_id):
        command = command_of(child)
        if "engine_worker.process" in command:
            found[json.loads(command[command.index("{") :])["place"]["rank"]] = child
    return [found[rank] for rank in sorted(found)]


def post(server: RealServer, route: str, tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = {"text_input": PROMPT, "max_tokens": tokens, "end_id": 95, **PENALTY}
    body["stream"] = route.endswith("stream")
    connection.request("POST", f"/v2/models/{MODEL}/{route}", json.dumps(body))
    return connection.getresponse()


def ask(server: RealServer, tokens: int = 24) -> str:
    response = post(server, "generate", tokens)
    answer = json.loads(response.read())
    assert response.status == 200, answer
    text: str = answer["text_output"]
    return text


def is_ready(server: RealServer) -> bool:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("GET", "/v2/health/ready")
    return connection.getresponse().status == 200


def test_two_ranks_answer_as_one(server, expected):
    assert ask(server) == expected
    assert len(engine_processes(server)) == 2
    assert "on cpu with 2 ranks (MiB: of each rank), loaded in" in server.log()


def test_a_rank_that_is_stopped_while_the_engine_is_idle_makes_it_not_ready(server):
    wait_for(lambda: is_ready(server))
    ranks = engine_processes(server)
    os.kill(ranks[1], signal.SIGSTOP)
    wait_for(lambda: not is_ready(server))
    os.kill(ranks[1], signal.SIGCONT)
    wait_for(lambda: is_ready(server))
    assert engine_processes(server) == ranks


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_fails_the_stream_and_the_engine_starts_again(server, expected, rank):
    wait_for(lambda: is_ready(server))
    before = engine_processes(server)
    response = post(server, "generate_stream", 240)
    first = response.readline()
    assert first.startswith(b"data:"), first
    os.kill(before[rank], signal.SIGKILL)
    rest = response.read().decode()
    assert f"the engine process failed: rank {rank}: killed by SIGKILL" in rest
    assert not is_ready(server)
    wait_for(lambda: is_ready(server))
    assert ask(server) == expected
    after = engine_processes(server)
    assert len(after) == 2
    assert not set(before) & set(after)
    assert not any(is_running(process) for process in before)


def test_a_rank_that_stays_stopped_is_named_to_the_client_and_replaced(server, expected):
    wait_for(lambda: is_ready(server))
    before = engine_processes(server)
    response = post(server, "generate_stream", 240)
    assert response.readline().startswith(b"data:")
    os.kill(before[1], signal.SIGSTOP)
    reason = "the engine process failed: rank 1 has been stopped by a signal for 10 s"
    assert reason in response.read().decode()
    wait_for(lambda: is_ready(server))
    assert ask(server) == expected
    assert not any(is_running(process) for process in before)


def test_several_front_ends_share_an_engine_of_two_ranks(tmp_path, engine, expected):
    running = start_server(tmp_path, engine, "--frontends", "2")
    try:
        assert [ask(running) for _ in range(4)] == [expected] * 4
        processes = [running.process_id, *children_of(running.process_id)]
        assert len(engine_processes(running)) == 2
    finally:
        os.kill(running.process_id, signal.SIGKILL)
        running.close()
    wait_for(lambda: not any(is_running(process) for process in processes))


async def read_all(client: EngineClient, tokens: int = 20) -> list[int]:
    found: list[int] = []
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=5)
    async for output in submit(client, [5, 6, 7], sampling):
        found += output.tokens
    return found


async def test_a_token_that_differs_ends_the_engine_with_the_number_of_its_row(engine):
    command = (sys.executable, str(SUPPORT / "flipping_engine.py"))
    client = EngineClient(engine, SETTINGS, Supervision(restarts=0), command)
    async with asyncio.timeout(90):
        await client.start()
        # rows 0 to 2 run, so that the flipped row is compared
        await asyncio.gather(*(read_all(client) for _ in range(3)))
        reason = await client.wait_failed()
        await client.stop()
    assert "RankFailed: rank 1 holds other tokens than rank 0 (row 2)" in reason


async def test_a_rank_that_hangs_is_killed_with_the_others_and_the_stacks_are_logged(engine, capfd):
    client = EngineClient(engine, SETTINGS, Supervision(silence_seconds=1.0))
    async with asyncio.timeout(90):
        await client.start()
        expected = await read_all(client)
        assert client.process_id is not None
        ranks = client.process_ids
        os.kill(ranks[1], signal.SIGSTOP)
        request = asyncio.ensure_future(read_all(client, 200))
        await request
        while not client.ready:
            await asyncio.sleep(0.05)
        assert await read_all(client) == expected
        await client.stop()
    log = capfd.readouterr().err
    assert "rank 1 has been stopped by a signal" in log
    assert "; its stacks follow" in log
    assert "all_reduce" in log  # the stack of rank 0, which waits for rank 1
    assert "rank 1:   File" in log
    assert "in orders" in log  # the stack of rank 1, which was stopped as it waited for an order
    assert not any(is_running(process) for process in ranks)


def test_a_number_of_ranks_that_does_not_divide_a_model_is_refused_before_the_start(engine):
    model = SimpleNamespace(
        name="tensorrt_llm", engine_config=read_engine_config(engine), settings=EngineSettings()
    )
    pool = EnginePool({"ranks": 3}, Supervision(), ())
    with pytest.raises(ValueError) as error:
        pool.check([model])
    problem = (
        "tensorrt_llm: tp_size 3 does not divide this model: it has 4 heads; "
        "possible numbers of ranks: 1, 2, 4"
    )
    assert str(error.value) == problem
    with pytest.raises(ValueError, match="tensorrt_llm: ranks must be at least 1, not 0"):
        EnginePool({"ranks": 0}, Supervision(), ()).check([model])


def test_an_engine_that_was_built_for_ranks_runs_with_one_and_says_so(engine, caplog):
    config = replace(read_engine_config(engine), wanted_ranks=4)
    model = SimpleNamespace(name="m", engine_config=config, settings=EngineSettings())
    with caplog.at_level("INFO"):
        EnginePool({}, Supervision(), ()).create(model)
    assert "m was built for 4 ranks, which need as many GPUs: it runs with 1 rank" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        EnginePool({"ranks": 2}, Supervision(), ()).create(model)
    assert caplog.text == ""


def test_orders_are_decoded_into_their_own_types_only():
    plan = StepPlan(7, rows=[1], epochs=[2], positions=[3], counts=[1], samples=[True], drafts=[0])
    plan.masks[1] = b"\x01"
    orders = [plan, AdapterHere(1, 8, "float32", b"1234", [b"run"], [1]), DigestRequest(), Leave()]
    assert [decode_order(encode_order(order)) for order in orders] == orders
    with pytest.raises(LinkError, match="unexpected kind of order: b'X'"):
        decode_order(b"X123")
    with pytest.raises(LinkError, match="damaged StepPlan from the leading rank"):
        decode_order(b"P\x93")
    with pytest.raises(LinkError, match="damaged AdapterHere from the leading rank"):
        decode_order(encode_order(orders[1]).replace(b"float32", b"float\xff2"))
