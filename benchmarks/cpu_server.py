"""Measure a whole server on a CPU: `slipstream start` to the first token over HTTP, and what it
uses while it is idle.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from contender import process_tree

_DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.01
_SETTLE_SECONDS = 1.0  # after the answer, until the server is idle
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class ServerFigures(NamedTuple):
    first_token_seconds: float  # from the start of the command
    idle_cores: float  # CPU time of all processes a second


def measure_server(engine: Path, prompt: str, log: Path, idle_seconds: float) -> ServerFigures:
    port = _free_port()
    ports = [f"--http-port={port}", f"--grpc-port={_free_port()}", f"--metrics-port={_free_port()}"]
    command = [sys.executable, "-m", "slipstream.cli.main", "start", str(engine), *ports]
    began = time.perf_counter()
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_for_token(server, port, prompt, log)
        seconds = time.perf_counter() - began
        time.sleep(_SETTLE_SECONDS)
        before = _cpu_seconds(server.pid)
        time.sleep(idle_seconds)
        idle = (_cpu_seconds(server.pid) - before) / idle_seconds
    finally:
        server.terminate()
        server.wait(30.0)
    return ServerFigures(seconds, idle)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_token(server: subprocess.Popen[bytes], port: int, prompt: str, log: Path) -> None:
    """Ask until the server answers with a token."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server has ended; see {log}")
        try:
            if _ask(port, prompt):
                return
        except (OSError, http.client.HTTPException):  # it does not listen yet
            pass
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"no token within {_DEADLINE_SECONDS:g} s; see {log}")


def _ask(port: int, prompt: str) -> bool:
    """Return whether the server streams a token of its first model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_SECONDS)
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read()).get("data")
        if not models:
            return False
        body = {"model": models[0]["id"], "prompt": prompt, "max_tokens": 2, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status == 200 and answer.readline().startswith(b"data: {")
    finally:
        connection.close()


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of a process and its children."""
    total = 0
    for number in process_tree(process):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _CLOCK_TICKS
