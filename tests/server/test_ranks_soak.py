"""Random ends of ranks under load, and many cancelled requests, over HTTP with two ranks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from real_server import RealServer
from test_ranks_server import engine_processes, is_ready, start_server
from tiny_engine import build_tiny_engine
from tiny_server import children_of, is_running, wait_for

from slipstream.llm import LLM

pytestmark = pytest.mark.slow

STREAMS = 16
KILLS = 3  # as many restarts as a server allows in ten minutes
CANCELS = 10_000
TOKENS = 200
BODY = {"end_id": 95, "stream": True, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def server(tmp_path: Path, engine: Path) -> Iterator[RealServer]:
    running = start_server(tmp_path, engine, "--frontends", "1")
    yield running
    processes = [running.process_id, *children_of(running.process_id)]
    running.close()
    wait_for(lambda: not any(is_running(process) for process in processes))


@pytest.fixture(scope="module")
def expected(engine: Path) -> dict[str, str]:
    """Return the answers of one rank, by prompt."""
    prompts = [f"5 6 {number}" for number in range(STREAMS)]
    with LLM(engine, "float32", device="cpu", cache_tokens=4096, threads=1) as llm:
        answers = llm.generate(prompts, max_tokens=TOKENS, ignore_end=True)
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


async def stream(client: httpx.AsyncClient, server: RealServer, prompt: str) -> tuple[str, str]:
    """Return the text and the error of a stream."""
    text = ""
    error = ""
    url = f"http://{server.http}/v2/models/tiny/generate_stream"
    async with client.stream("POST", url, json=BODY | {"text_input": prompt}) as found:
        async for line in found.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                text += event.get("text_output", "")
                error += event.get("error", "")
            elif found.status_code != 200 and line:
                error += json.loads(line)["error"]
    return text, error


def blocks(server: RealServer) -> dict[str, float]:
    text = httpx.get(f"http://{server.metrics}/metrics").text
    pattern = r'nv_trt_llm_kv_cache_block_metrics\{[^}]*block_type="(\w+)"[^}]*\} (\S+)'
    return {kind: float(value) for kind, value in re.findall(pattern, text)}


def count_of(server: RealServer, name: str) -> float:
    text = httpx.get(f"http://{server.metrics}/metrics").text
    return sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))


def check_idle(server: RealServer) -> None:
    """Check that no block is in use, and that the digests of the ranks agreed."""
    wait_for(lambda: blocks(server)["used"] == 0)
    assert blocks(server)["free"] == blocks(server)["max"]
    assert "holds other tokens" not in server.log()


async def test_random_kills_of_any_rank_fail_streams_with_the_reason(server, expected):
    draw = random.Random(7)
    prompts = list(expected)
    failed = 0
    async with httpx.AsyncClient(timeout=120) as client:
        for _ in range(KILLS):
            before = engine_processes(server)
            victim = draw.randrange(2)
            running = [asyncio.create_task(stream(client, server, p)) for p in prompts]
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            os.kill(before[victim], signal.SIGKILL)
            for prompt, (text, error) in zip(prompts, await asyncio.gather(*running), strict=True):
                if error:
                    failed += 1
                    assert f"rank {victim}: killed by SIGKILL" in error, error
                    assert expected[prompt].startswith(text)
                else:
                    assert text == expected[prompt]
            wait_for(lambda: is_ready(server), 60)
            assert not any(is_running(process) for process in before)
        answers = await asyncio.gather(*(stream(client, server, prompt) for prompt in prompts))
    assert failed > STREAMS
    assert [text for text, _ in answers] == list(expected.values())
    check_idle(server)


async def leave(server: RealServer, draw: random.Random, prompt: str) -> None:
    """Begin a stream and close the connection at a random moment."""
    host, _, port = server.http.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(BODY | {"text_input": prompt, "temperature": 1.0}).encode()
    head = "POST /v2/models/tiny/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    if draw.random() < 0.7:
        await reader.readuntil(b"data: ")
    await asyncio.sleep(draw.uniform(0.0, 0.05))
    writer.transport.abort()


async def test_ten_thousand_cancelled_requests_leave_nothing(server, expected):
    draw = random.Random(11)
    places = asyncio.Semaphore(STREAMS)
    before = engine_processes(server)

    async def one(number: int) -> None:
        async with places:
            await leave(server, draw, f"{number % 90} {draw.randrange(90)} 7")

    await asyncio.gather(*(one(number) for number in range(CANCELS)))
    wait_for(lambda: count_of(server, "slipstream_requests_running") == 0)
    cancelled = count_of(server, "slipstream_requests_cancelled_total")
    assert cancelled > CANCELS / 2
    check_idle(server)
    assert engine_processes(server) == before  # a difference between ranks would have ended them
    async with httpx.AsyncClient(timeout=120) as client:
        prompt = next(iter(expected))
        assert await stream(client, server, prompt) == (expected[prompt], "")
