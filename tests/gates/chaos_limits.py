"""Memory, disks and files that fail: what a server says, and whether it goes on."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import scripted_engine
from free_ports import free_ports
from real_server import RealServer, limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import MODEL, TRITONSERVER, TinyServer, is_running, make_repository, wait_for

from gates.table import Row, attempt
from gates.traffic import Outcome, new_client, status, stream, until, until_status
from slipstream.repository.templates import write_repository

_STREAMS = 16
_MOST_SECONDS = 2.0
_READY = "/v2/health/ready"


async def run_limits(folder: Path, rows: list[Row]) -> None:
    folder.mkdir()
    await attempt(rows, _stop_and_continue(folder / "stop"))
    await attempt(rows, _kill_while_loading(folder / "load"))
    await attempt(rows, _no_memory(folder / "memory"))
    await attempt(rows, _full_log(folder / "log"))
    await attempt(rows, asyncio.to_thread(_real_engine, folder / "real"))


async def _stop_and_continue(folder: Path) -> Row:
    """With the default watchdog: not ready soon, and whole streams when it goes on."""
    folder.mkdir()
    server = TinyServer(make_repository(folder), folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            outcomes = [Outcome() for _ in range(_STREAMS)]
            running = asyncio.gather(
                *(stream(client, server, 1, 100, 20, outcome) for outcome in outcomes)
            )
            await until(lambda: all(outcome.events for outcome in outcomes))
            engine = server.engine_process()
            os.kill(engine, signal.SIGSTOP)
            unready = await until_status(client, server, _READY, 400)
            os.kill(engine, signal.SIGCONT)
            again = await until_status(client, server, _READY, 200)
            await running
    finally:
        server.close()
    whole = sum(len(outcome.text.split()) == 100 for outcome in outcomes)
    text = f"not ready in {unready:.2f} s, ready {again:.2f} s after SIGCONT, "
    text += f"{whole} of {_STREAMS} streams whole"
    holds = unready < _MOST_SECONDS and whole == _STREAMS
    return Row("engine SIGSTOP and SIGCONT, default watchdog", text, holds)


async def _kill_while_loading(folder: Path) -> Row:
    """The engine is killed while the server starts, and then loaded by a request."""
    folder.mkdir()
    options = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    repository = make_repository(folder, "killed")
    server = TinyServer(repository, folder / "tmp", *options, program=TRITONSERVER)
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            before = await status(client, server, "/v2/models/tensorrt_llm/ready")
            url = f"{server.url}/v2/repository/models/tensorrt_llm/load"
            loaded = (await client.post(url, json={})).status_code
            models = [
                await status(client, server, f"/v2/models/{name}/ready")
                for name in (MODEL, "ensemble", "tensorrt_llm")
            ]
            answer = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    text = f"engine model {before}, its load {loaded}, then all models {models}"
    holds = (before, loaded, models) == (400, 200, [200] * 3) and answer.text == "6 7 8"
    return Row("engine SIGKILL while loading", text, holds)


async def _no_memory(folder: Path) -> Row:
    """The engine gets no further memory (RLIMIT_AS), and a request makes it ask for more."""
    folder.mkdir()
    server = TinyServer(make_repository(folder), folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            engine = server.engine_process()
            used = int(Path(f"/proc/{engine}/statm").read_text().split()[0]) * 4096
            resource.prlimit(engine, resource.RLIMIT_AS, (used, used))
            outcomes = [Outcome() for _ in range(_STREAMS)]
            running = asyncio.gather(
                *(stream(client, server, 1, 3000, 2, outcome) for outcome in outcomes)
            )
            await until(lambda: all(outcome.events for outcome in outcomes))
            await stream(client, server, scripted_engine.ALLOCATE, 3, 0)
            await running
            received = sum(bool(outcome.error) for outcome in outcomes)
            whole = sum(len(outcome.text.split()) == 3000 for outcome in outcomes)
            await until_status(client, server, _READY, 200)
            after = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    reasons = {outcome.error for outcome in outcomes if outcome.error}
    named = any("MemoryError" in reason for reason in reasons)
    text = f"{whole} of {_STREAMS} streams whole, {received} received the error, ready afterwards"
    if not named:
        text += f"; reasons: {reasons}"
    holds = whole + received == _STREAMS and received > 0 and named and after.text == "6 7 8"
    return Row("engine without further memory (RLIMIT_AS)", text, holds)


async def _full_log(folder: Path) -> Row:
    """The server's output goes to a full disk."""
    folder.mkdir()
    http, grpc, metrics = free_ports(3)
    server = _FullLogServer(make_repository(folder), folder / "tmp", http, grpc, metrics)
    try:
        async with new_client() as client:
            await until_status(client, server, _READY, 200)
            answers = [await stream(client, server, 5, 3, 0) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.process.wait, 30)
    finally:
        server.close()
    right = sum(answer.text == "6 7 8" for answer in answers)
    text = f"{right} of 3 answers right, exit code {code}"
    return Row("log on a full disk", text, right == 3 and code == 0)


class _FullLogServer(TinyServer):
    """A server whose lines cannot be written, and so not be read."""

    def __init__(self, repository: Path, temporary: Path, *numbers: int) -> None:
        names = ("HTTPService", "GRPCInferenceService", "Metrics Service")
        flags = ("--http-port", "--grpc-port", "--metrics-port")
        options = [f"{flag}={number}" for flag, number in zip(flags, numbers, strict=True)]
        super().__init__(repository, temporary, *options, output=Path("/dev/full"))
        self.ports = dict(zip(names, numbers, strict=True))


def _real_engine(folder: Path) -> list[Row]:
    engine = build_tiny_engine(folder)
    repository = folder / "repository"
    write_repository(repository, MODEL, engine, engine, 64)
    limit_cache(repository, 4096)
    rows = []
    for case, options in {
        "read-only home": "ro,size=1m",
        "home on a full disk": "size=4k,nr_inodes=2",
    }.items():
        rows.append(_with_home(folder / case.replace(" ", "-"), repository, case, options))
    rows += _damaged(folder / "damaged", repository, engine)
    return rows


def _with_home(folder: Path, repository: Path, case: str, options: str) -> Row:
    """A server whose home is a file system that takes nothing."""
    home = folder / "home"
    home.mkdir(parents=True)
    with _mounted(home, options) as mounted:
        if not mounted:
            return Row(case, "a file system cannot be mounted: needs root", None)
        variables = {"HOME": str(home), "SLIPSTREAM_HOME": str(home / "slipstream")}
        server = RealServer(repository, folder / "log", variables=variables)
        try:
            server.wait()
            text = _generate(server)
            bad = [line for line in server.log().splitlines() if "Traceback" in line]
        finally:
            server.close()
    return Row(case, f"serves, {len(bad)} tracebacks", bool(text) and not bad)


@contextmanager
def _mounted(place: Path, options: str) -> Iterator[bool]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def _generate(server: RealServer) -> str:
    import httpx

    body = {"text_input": "5 6 7", "max_tokens": 4, "end_id": 95}
    url = f"http://{server.http}/v2/models/{MODEL}/generate"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    return str(answer.json().get("text_output", ""))


def _damaged(folder: Path, repository: Path, engine: Path) -> list[Row]:
    """Each file of a real engine folder, cut in the middle."""
    files = sorted(path for path in engine.iterdir() if path.is_file())
    return [_cut(folder / file.name, repository, file) for file in files]


def _cut(folder: Path, repository: Path, file: Path) -> Row:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    server = RealServer(repository, folder)
    try:
        wait_for(lambda: not is_running(server.process_id) or "Started " in server.log(), 60)
        code = None if "Started " in server.log() else server._process.wait(20)
        lines = server.log().splitlines()
    finally:
        server.close()
        file.write_bytes(content)
    named = any(file.name in line for line in lines)
    traceback = any("Traceback" in line for line in lines)
    text = f"exit code {code}, {'names' if named else 'does not name'} the file"
    holds = code == 1 and named and not traceback
    return Row(f"real engine folder, {file.name} cut in half", text, holds)
