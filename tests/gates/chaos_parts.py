"""Servers of several processes: one of them is killed or stopped, and the others go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
from front_ends import UPPER, UPPER_CONFIG, secondaries
from real_server import RealServer, limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import (
    MODEL,
    TinyServer,
    children_of,
    command_of,
    is_running,
    make_repository,
    wait_for,
)

from gates.table import Row, attempt
from gates.traffic import Outcome, new_client, stream, until, until_status
from slipstream.repository.templates import write_repository

_STREAMS = 16
_READY = "/v2/health/ready"


async def run_parts(folder: Path, rows: list[Row]) -> None:
    folder.mkdir()
    await attempt(rows, _replica(folder / "replicas"))
    await attempt(rows, _front_end(folder / "front ends"))
    for number in (signal.SIGKILL, signal.SIGSTOP):
        place = folder / f"python{number}"
        await attempt(rows, asyncio.to_thread(_python_model, place, number))
    engine = await asyncio.to_thread(build_tiny_engine, folder / "ranks")
    for rank in (0, 1):
        await attempt(rows, asyncio.to_thread(_rank, folder / f"rank{rank}", engine, rank))


def _engines(server: TinyServer) -> list[int]:
    children = children_of(server.process.pid)
    return [child for child in children if "scripted_engine" in command_of(child)]


async def _replica(folder: Path) -> Row:
    folder.mkdir()
    server = TinyServer(make_repository(folder), folder / "tmp", "--replicas", "2")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            found = await _streams_beside(client, server, lambda: _engines(server)[0])
            await until(lambda: len(_engines(server)) == 2)
            after = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    whole, received, cut = found
    text = (
        f"{whole} of {_STREAMS} streams whole, {received} received the error, {cut} cut, replaced"
    )
    holds = whole + received == _STREAMS and whole > 0 and received > 0 and after.text == "6 7 8"
    return Row("one of 2 replicas SIGKILL", text, holds)


async def _front_end(folder: Path) -> Row:
    folder.mkdir()
    server = TinyServer(make_repository(folder), folder / "tmp", "--frontends", "2")
    try:
        await asyncio.to_thread(server.wait_started)
        (second,) = secondaries(server.process.pid)
        async with new_client() as client:
            whole, received, cut = await _streams_beside(client, server, lambda: second)
            await until(lambda: secondaries(server.process.pid) not in ([], [second]))
            await until_status(client, server, _READY, 200)
            after = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    text = f"{whole} of {_STREAMS} streams whole, {cut} of the killed one cut, replaced"
    holds = whole + cut == _STREAMS and not received and whole > 0 and after.text == "6 7 8"
    return Row("one of 2 front ends SIGKILL", text, holds)


async def _streams_beside(
    client: httpx.AsyncClient, server: TinyServer, victim: Callable[[], int]
) -> tuple[int, int, int]:
    """Kill a process while streams run. Return how many are whole, received the error, and cut."""
    tokens = 60
    outcomes = [Outcome() for _ in range(_STREAMS)]
    running = asyncio.gather(
        *(stream(client, server, 1, tokens, 20, outcome) for outcome in outcomes)
    )
    await until(lambda: all(outcome.events for outcome in outcomes))
    os.kill(victim(), signal.SIGKILL)
    await running
    received = sum("SIGKILL" in outcome.error for outcome in outcomes)
    cut = sum(outcome.cut for outcome in outcomes)
    whole = sum(len(outcome.text.split()) == tokens and not outcome.cut for outcome in outcomes)
    return whole, received, cut


def _python_model(folder: Path, number: signal.Signals) -> Row:
    """A model.py in a process of its own; a stopped one is continued."""
    folder.mkdir()
    repository = make_repository(folder)
    (repository / "upper" / "1").mkdir(parents=True)
    (repository / "upper" / "1" / "model.py").write_text(UPPER)
    (repository / "upper" / "config.pbtxt").write_text(UPPER_CONFIG)
    server = TinyServer(repository, folder / "tmp", "--allow-python-models", "--frontends", "1")
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    try:
        server.wait_started()
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:

            def ask() -> int:
                return client.post("/v2/models/upper/infer", json=body).status_code

            before = ask()
            (worker,) = _workers(server)
            os.kill(worker, number)
            text = {"text_input": "5", "max_tokens": 3}
            beside = client.post(f"/v2/models/{MODEL}/generate", json=text).json()
            if number == signal.SIGSTOP:
                os.kill(worker, signal.SIGCONT)
            else:
                wait_for(lambda: not is_running(worker))
            wait_for(lambda: ask() == 200)
    finally:
        server.close()
    others = "right" if beside.get("text_output") == "6 7 8" else f"wrong: {beside}"
    found = f"200 before and after, answers of other models meanwhile {others}"
    return Row(f"Python model {number.name}", found, before == 200 and others == "right")


def _workers(server: TinyServer) -> list[int]:
    children = children_of(server.process.pid)
    return [child for child in children if "python_models" in command_of(child)]


def _rank(folder: Path, engine: Path, rank: int) -> list[Row]:
    """A real engine of two ranks. The watchdog ends one that is stopped."""
    repository = folder / "repository"
    write_repository(repository, MODEL, engine, engine, 64)
    limit_cache(repository, 4096)
    program = ("-m", "slipstream.cli.main", "start", "--repo", str(repository))
    settings = ("--dtype", "float32", "--device", "cpu", "--ranks", "2", "--watchdog-secs", "3")
    server = RealServer(repository, folder / "log", *program, *settings)
    try:
        base = f"http://{server.wait().http}"
        with httpx.Client(base_url=base, timeout=90, trust_env=False) as client:
            before = _ask(client)
            return [
                _end_rank(server, client, rank, number, before)
                for number in (signal.SIGKILL, signal.SIGSTOP)
            ]
    finally:
        server.close()


def _end_rank(
    server: RealServer, client: httpx.Client, rank: int, number: signal.Signals, before: str
) -> Row:
    victim = _by_rank(server)[rank]
    os.kill(victim, number)
    wait_for(lambda: client.get(_READY).status_code == 400)
    wait_for(lambda: client.get(_READY).status_code == 200, 60)
    right = _ask(client) == before
    gone = not is_running(victim)
    found = "not ready, then both ranks replaced, the same answer"
    found += "" if right and gone else f": {right=} {gone=}"
    return Row(f"rank {rank} of 2 {number.name}", found, right and gone)


def _ask(client: httpx.Client) -> str:
    body = {"text_input": "5 6 7", "max_tokens": 12, "end_id": 95}
    text: str = client.post(f"/v2/models/{MODEL}/generate", json=body).json()["text_output"]
    return text


def _by_rank(server: RealServer) -> list[int]:
    found = {}
    for child in children_of(server.process_id):
        command = command_of(child)
        if "engine_worker.process" in command:
            found[json.loads(command[command.index("{") :])["place"]["rank"]] = child
    return [found[rank] for rank in sorted(found)]
