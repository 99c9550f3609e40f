"""Processes that are killed, stopped or cannot read or write: what clients get, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
from tiny_server import TinyServer, is_running, make_repository, wait_for

from gates.chaos_limits import run_limits
from gates.chaos_parts import run_parts
from gates.table import Row, attempt
from gates.traffic import Outcome, new_client, status, stream, until, until_status

_STREAMS = 16
_MOST_SECONDS = 2.0  # longest time until a failure is reported
_READY = "/v2/health/ready"
_TRACED = ("--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=1")


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """`long`: several times, because a signal meets the server in another state each time. It also
    tries servers of several processes, and memory and disks that fail.
    """
    for round_number in range(5 if long else 1):
        place = folder / str(round_number)
        place.mkdir()
        await _run_once(place, rows)
    if long:
        await run_limits(folder / "limits", rows)
        await run_parts(folder / "parts", rows)


async def _run_once(folder: Path, rows: list[Row]) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        await attempt(rows, _kill_engine(folder / number.name, number, streams=_STREAMS))
    await attempt(rows, _kill_engine(folder / "idle", signal.SIGKILL, streams=0))
    for streams in (0, _STREAMS):
        await attempt(rows, _stop_engine(folder / f"stop{streams}", streams))
    await attempt(rows, _kill_server(folder / "server"))
    await attempt(rows, _kill_while_loading(folder / "loading"))
    await attempt(rows, _stop_while_loading(folder / "stopping"))
    await attempt(rows, _damaged_engine(folder / "damaged"))
    await attempt(rows, _full_disk(folder / "disk"))


def _start(folder: Path, *options: str, engine: str = "fine") -> TinyServer:
    folder.mkdir(exist_ok=True)
    return TinyServer(make_repository(folder, engine), folder / "tmp", *options)


async def _begin(
    client: httpx.AsyncClient, server: TinyServer, streams: int
) -> asyncio.Future[list[Outcome]]:
    outcomes = [Outcome() for _ in range(streams)]
    running = asyncio.gather(
        *(stream(client, server, 1, 3000, 20, outcome) for outcome in outcomes)
    )
    await until(lambda: all(outcome.events for outcome in outcomes))
    return running


async def _kill_engine(folder: Path, number: signal.Signals, streams: int) -> Row:
    server = _start(folder)
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            running = await _begin(client, server, streams)
            engine = server.engine_process()
            begun = time.monotonic()
            os.kill(engine, number)
            unready = await until_status(client, server, _READY, 400)
            outcomes = await running
            received = sum(number.name in outcome.error for outcome in outcomes)
            slowest = max((outcome.ended - begun for outcome in outcomes), default=0.0)
            again = await until_status(client, server, _READY, 200)
            answer = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    found = f"not ready in {unready:.2f} s, {received} of {streams} received the error in {slowest:.2f} s"
    prompt = max(unready, slowest) < _MOST_SECONDS
    holds = prompt and received == streams and answer.text == "6 7 8"
    return Row(
        f"engine {number.name}, {streams} streams", f"{found}, ready in {again:.1f} s", holds
    )


async def _stop_engine(folder: Path, streams: int) -> Row:
    server = _start(folder, "--watchdog-secs", "4")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            running = await _begin(client, server, streams)
            os.kill(server.engine_process(), signal.SIGSTOP)
            unready = await until_status(client, server, _READY, 400)
            outcomes = await running
            received = sum("has been stopped by a signal" in outcome.error for outcome in outcomes)
            again = await until_status(client, server, _READY, 200)
            answer = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    found = f"not ready in {unready:.2f} s, {received} of {streams} received the error, replaced in {again:.1f} s"
    holds = unready < _MOST_SECONDS and received == streams and answer.text == "6 7 8"
    return Row(f"engine SIGSTOP, {streams} streams, watchdog 4 s", found, holds)


async def _kill_server(folder: Path) -> Row:
    server = _start(folder)
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            running = await _begin(client, server, _STREAMS)
            engine = server.engine_process()
            server.process.kill()
            outcomes = await running
        cut = sum(outcome.cut for outcome in outcomes)
        gone = await until(lambda: not is_running(engine))
        left = server.remaining_files()
    finally:
        server.close()
    found = f"{cut} of {_STREAMS} cut, engine gone in {gone:.2f} s, {len(left)} files left"
    return Row(f"server SIGKILL, {_STREAMS} streams", found, cut == _STREAMS and not left)


async def _kill_while_loading(folder: Path) -> Row:
    server = _start(folder, engine="slow")
    try:
        await asyncio.to_thread(wait_for, server.engine_process)
        engine = server.engine_process()
        server.process.kill()
        gone = await until(lambda: not is_running(engine))
    finally:
        server.close()
    other = TinyServer(make_repository(folder / "next"), server.temporary)
    try:
        await asyncio.to_thread(other.wait_started)
        left = other.remaining_files()
    finally:
        other.close()
    found = f"engine gone in {gone:.2f} s, {len(left)} files left after the next start"
    return Row("server SIGKILL while loading", found, not left)


async def _stop_while_loading(folder: Path) -> Row:
    server = _start(folder, engine="slow")
    try:
        await asyncio.to_thread(wait_for, server.engine_process)
        begun = time.monotonic()
        server.process.terminate()
        code = await asyncio.to_thread(server.wait_exit)
        seconds = time.monotonic() - begun
        left = server.remaining_files()
    finally:
        server.close()
    found = f"code {code} in {seconds:.2f} s, {len(left)} files left"
    return Row("server SIGTERM while loading", found, code == 0 and not left)


async def _damaged_engine(folder: Path) -> Row:
    server = _start(folder, engine="bad")
    try:
        code = await asyncio.to_thread(server.wait_exit)
    finally:
        server.close()
    starts = (folder / "engines" / "bad" / "starts").read_text().count("start")
    last = server.lines[-1] if server.lines else ""
    named = "this engine folder is bad by order" in last
    found = f"code {code}, {starts} start, the last line {'names' if named else 'hides'} the reason"
    return Row("engine folder that cannot be loaded", found, code == 1 and starts == 1 and named)


async def _full_disk(folder: Path) -> Row:
    server = _start(folder, "--trace-config", "triton,file=/dev/full", *_TRACED)
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            answers = [await stream(client, server, 5, 3, 0) for _ in range(3)]
            health = await status(client, server, _READY)
    finally:
        server.close()
    right = sum(answer.text == "6 7 8" for answer in answers)
    return Row(
        "trace file on a full disk", f"{right} of 3 answers right, ready {health}", right == 3
    )
