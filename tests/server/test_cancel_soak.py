"""Thousands of clients disconnect at random moments from a real server, and nothing leaks.

The cache is too small for all of them. They therefore leave while they wait, during prefill, during
the stream and after the last token. The test fails if a block, a row or a task is kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from real_server import limit_cache
from tiny_models import config_of, random_model
from tiny_server import MODEL, ROOT, STARTED, wait_for

from slipstream.repository.templates import write_repository
from slipstream.weights.build import build_engine

CACHE_TOKENS = 2048
LONGEST = 120  # tokens of prompt and answer, in four of the cache's 64 blocks
CLIENTS = 32
CANARY = {"text_input": "7 11 13 17", "max_tokens": 100, "end_id": -1, "stream": True}


class RealServer:
    """`slipstream start` as a user runs it, on free ports, on a random tiny Llama."""

    def __init__(self, repository: Path, log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "slipstream.cli.main", "start", "--repo", str(repository)]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--device", "cpu", "--dtype", "float32"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, preexec_fn=_stay_on_one_core
            )
        wait_for(lambda: "API docs" in self.log() or self.process.poll() is not None, 60)
        self.ports = {name: int(port) for name, port in STARTED.findall(self.log())}
        assert len(self.ports) == 3, self.log()

    def log(self) -> str:
        return self._log.read_text()

    @property
    def http_port(self) -> int:
        return self.ports["HTTPService"]

    def gauges(self) -> dict[str, float]:
        """Return the metrics of requests and blocks by type."""
        text = httpx.get(f"http://127.0.0.1:{self.ports['Metrics Service']}/metrics").text
        pattern = (
            r'nv_trt_llm_\w+_metrics\{[^}]*?(?:request|block|general)_type="(\w+)"[^}]*\} (\S+)'
        )
        found = {kind: float(value) for kind, value in re.findall(pattern, text)}
        pattern = (
            r'nv_inference_request_failure\{model="counter",reason="CANCELED",version="1"\} (\S+)'
        )
        return found | {"cancelled": float(re.findall(pattern, text)[0])}

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()


def _stay_on_one_core() -> None:
    """Restrict the engine to one core: a second thread only waits for this small model."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    random_model(config_of("llama", max_position_embeddings=CACHE_TOKENS)).save_pretrained(
        folder / "model"
    )
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(96)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    engine = build_engine(folder / "model", folder / "engine", dtype="float32")
    write_repository(folder / "repository", MODEL, engine, engine, 64)
    limit_cache(folder / "repository", CACHE_TOKENS)
    running = RealServer(folder / "repository", folder / "log")
    yield running
    assert running.close() == 0, running.log()


def request_bytes(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def answer_text(body: bytes) -> str:
    events = [json.loads(line) for line in re.findall(rb"data: ?(\{.*\})", body)]
    assert events, body
    assert all("error" not in event for event in events), events
    return " ".join(event["text_output"].strip() for event in events)


async def leave_at_random(port: int, draw: random.Random) -> str:
    """Run one client. Return how it disconnected."""
    prompt = " ".join(str(draw.randrange(2, 96)) for _ in range(draw.randrange(1, 60)))
    if draw.random() < 0.5:
        # a prefix of several requests, whose blocks are shared
        prompt = "3 5 8 13 21 34 55 89 " * 5 + prompt[:20]
    longest = LONGEST - len(prompt.split())
    body = {
        "text_input": prompt,
        "max_tokens": draw.randrange(2, longest),
        "end_id": -1,
        "stream": True,
    }
    body |= draw.choice([{}, {"top_p": 0.8}, {"return_log_probs": True}, {"stop_words": ["1 2 3"]}])
    way = draw.choice(
        [
            "in the request",
            "before the answer",
            "mid-stream",
            "mid-stream",
            "mid-stream",
            "at the end",
        ]
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = request_bytes(body)
    writer.write(sent[: draw.randrange(1, len(sent))] if way == "in the request" else sent)
    await writer.drain()
    if way == "before the answer":
        await asyncio.sleep(draw.random() * 0.02)
    elif way == "mid-stream":
        for _ in range(draw.randrange(1, 40)):
            if await reader.readline() == b"0\r\n":
                break  # the answer is complete
    elif way == "at the end":
        await reader.readuntil(b"\r\n0\r\n\r\n")  # the last chunk of the answer
    if draw.random() < 0.5:
        writer.transport.abort()  # a reset
    else:
        writer.close()
    return way


async def canary_text(port: int) -> str:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"http://127.0.0.1:{port}/v2/models/{MODEL}/generate_stream", json=CANARY
        )
    return answer_text(answer.content)


async def soak(port: int, count: int) -> tuple[Counter[str], list[str]]:
    """Run `count` clients. Return how they disconnected and what an undisturbed client read."""
    draws = [random.Random(number) for number in range(count)]
    ways: Counter[str] = Counter()
    canaries: list[str] = []

    async def one_after_another() -> None:
        while draws:
            ways[await leave_at_random(port, draws.pop())] += 1

    async def watch() -> None:
        while draws:
            canaries.append(await canary_text(port))

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one_after_another())
        group.create_task(watch())
    return ways, canaries


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_disconnected_clients_leave_no_blocks_rows_or_tasks(server, count):
    expected = asyncio.run(canary_text(server.http_port))
    assert len(expected.split()) == CANARY["max_tokens"]
    blocks = CACHE_TOKENS // server.gauges()["tokens_per"]
    wait_for(lambda: server.gauges()["free"] == blocks)  # the statistics follow the answer
    before = server.gauges()
    assert before["free"] == before["max"] == blocks

    ways, canaries = asyncio.run(soak(server.http_port, count))
    assert sum(ways.values()) == count
    assert (
        min(
            ways[way] for way in ("in the request", "before the answer", "mid-stream", "at the end")
        )
        > count // 20
    )
    wait_for(lambda: server.gauges()["active"] == 0)

    after = server.gauges()
    assert {kind: after[kind] for kind in ("free", "used", "active", "scheduled", "waiting")} == {
        "free": before["free"],
        "used": 0,
        "active": 0,
        "scheduled": 0,
        "waiting": 0,
    }
    assert after["cancelled"] - before["cancelled"] > count // 10, (
        "too few clients left while the engine worked"
    )
    assert canaries
    assert set(canaries) == {expected}
    assert asyncio.run(canary_text(server.http_port)) == expected
    complaints = [line for line in server.log().splitlines() if line.startswith(("E", "Traceback"))]
    assert complaints == []


async def read_a_little(port: int, body: dict) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(body))
    begun = await reader.readuntil(b"data:")
    writer.close()
    return begun


def test_the_engine_stops_generating_for_a_disconnected_client(server):
    before = server.gauges()
    asked = CACHE_TOKENS - 10
    begun = asyncio.run(read_a_little(server.http_port, CANARY | {"max_tokens": asked}))
    assert begun.startswith(b"HTTP/1.1 200")
    wait_for(lambda: server.gauges()["active"] == 0)
    after = server.gauges()
    assert after["iteration_counter"] - before["iteration_counter"] < asked // 2
    wait_for(lambda: server.gauges()["free"] == before["free"])
