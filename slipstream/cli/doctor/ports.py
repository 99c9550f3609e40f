"""Who has the ports that a server takes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from slipstream.cli.doctor.report import Finding, Section

PORTS = {"HTTP": 8000, "gRPC": 8001, "metrics": 8002}
_OPTIONS = {"HTTP": "--http-port", "gRPC": "--grpc-port", "metrics": "--metrics-port"}
_SECONDS = 2.0  # of silence
_ANSWER_SECONDS = 5.0  # for all of an answer: some servers let a byte through now and then
_MOST_BYTES = 1 << 20
# and empty settings
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def ports() -> Section:
    facts, findings = {}, []
    for service, port in PORTS.items():
        facts[f"{service} {port}"] = found = (
            "free" if _is_free(port) else f"in use by {_who(service, port)}"
        )
        if found != "free":
            ours = "a Slipstream" in found
            remedy = f"stop it, or start with {_OPTIONS[service]} and another number"
            findings.append(Finding(f"port {port} ({service}) is {found}", remedy, blocks=not ours))
    return Section("ports", facts, findings)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _who(service: str, port: int) -> str:
    answering = {"HTTP": _http_server, "gRPC": _grpc_server, "metrics": _metrics_server}[service](
        port
    )
    process = _process(port)
    return f"{answering} ({process})" if process else answering


def _http_server(port: int) -> str:
    deadline = time.monotonic() + _ANSWER_SECONDS
    status, body = _get(port, "/v2", deadline)
    if status == 0:
        return "something that does not answer HTTP"
    if status in (401, 403):
        return "a server that asks for a key"
    try:
        server = json.loads(body)
        name, version = server["name"], server["version"]
    except (ValueError, TypeError, KeyError):
        return "another HTTP server"
    if b'"Slipstream"' in _get(port, "/openapi.json", deadline)[1]:
        return "a Slipstream"
    return f"a Triton ({name} {version})"


def _metrics_server(port: int) -> str:
    status, body = _get(port, "/metrics", time.monotonic() + _ANSWER_SECONDS)
    if status == 0:
        return "something that does not answer HTTP"
    if b"\nslipstream_" in body:
        return "a Slipstream"
    return "a Triton" if b"\nnv_" in body else "another HTTP server"


def _grpc_server(port: int) -> str:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _SECONDS) as asked:
        asked.sendall(_HTTP2)
        if asked.recv(9)[3:4] == b"\x04":  # its settings
            ours = (
                _is_free(PORTS["HTTP"]) is False and _http_server(PORTS["HTTP"]) == "a Slipstream"
            )
            return "a Slipstream" if ours else "a gRPC server"
    return "something that does not answer gRPC"


def _get(port: int, path: str, deadline: float) -> tuple[int, bytes]:
    """Status and body; 0 where there is no HTTP. No proxy is asked: it is this machine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.connect()
        with _ended_at(deadline, connection.sock):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(_MOST_BYTES)
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


@contextmanager
def _ended_at(deadline: float, asked: socket.socket) -> Iterator[None]:
    """After that moment there is nothing more to read there."""

    def end() -> None:
        with suppress(OSError):  # the other side was faster
            asked.shutdown(socket.SHUT_RDWR)

    clock = threading.Timer(deadline - time.monotonic(), end)
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def _process(port: int, processes: Path = Path("/proc")) -> str:
    """The process that listens there, where this user may know; its name only, a command line may
    hold secrets.
    """
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [
                line.split() for line in (processes / "net" / table).read_text().splitlines()[1:]
            ]
            listening = (
                row for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
            )
            sockets |= {f"socket:[{row[9]}]" for row in listening}
    for descriptor in processes.glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if str(descriptor.readlink()) in sockets:
                folder = descriptor.parents[1]
                return f"process {folder.name}, {(folder / 'comm').read_text().strip()}"
    return ""
