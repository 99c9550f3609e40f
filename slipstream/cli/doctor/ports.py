"""The ports that a server needs, and the programs that use them."""

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
from slipstream.cli.processes.servers import listening_sockets

PORTS = {"HTTP": 8000, "gRPC": 8001, "metrics": 8002}
_OPTIONS = {"HTTP": "--http-port", "gRPC": "--grpc-port", "metrics": "--metrics-port"}
_SECONDS = 2.0  # longest wait for the next bytes
_ANSWER_SECONDS = 5.0  # longest wait for a whole answer: some servers send a byte now and then
_MAX_BYTES = 1 << 20
# HTTP/2's preface and an empty SETTINGS frame
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def ports() -> Section:
    facts = {}
    findings = []
    for service, port in PORTS.items():
        found = "free" if _is_free(port) else f"in use by {_describe_user(service, port)}"
        facts[f"{service} {port}"] = found
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


def _describe_user(service: str, port: int) -> str:
    """Return what answers on a port, and its process if this user may know it."""
    probes = {"HTTP": _http_server, "gRPC": _grpc_server, "metrics": _metrics_server}
    answering = probes[service](port)
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
        label = f"{server['name']} {server['version']}"
    except (ValueError, TypeError, KeyError):
        return "another HTTP server"
    if b'"Slipstream"' in _get(port, "/openapi.json", deadline)[1]:
        return "a Slipstream"
    return f"a Triton ({label})"


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
        if asked.recv(9)[3:4] == b"\x04":  # a SETTINGS frame
            http = PORTS["HTTP"]
            ours = not _is_free(http) and _http_server(http) == "a Slipstream"
            return "a Slipstream" if ours else "a gRPC server"
    return "something that does not answer gRPC"


def _get(port: int, path: str, deadline: float) -> tuple[int, bytes]:
    """Return status and body, or 0 if there is no HTTP. Proxies are not used for localhost."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.connect()
        with _shut_down_at(deadline, connection.sock):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(_MAX_BYTES)
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


@contextmanager
def _shut_down_at(deadline: float, asked: socket.socket) -> Iterator[None]:
    """Shut the socket down at that time, which ends a read that is still going on."""

    def end() -> None:
        with suppress(OSError):  # the peer has closed it
            asked.shutdown(socket.SHUT_RDWR)

    clock = threading.Timer(deadline - time.monotonic(), end)
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def _process(port: int, processes: Path = Path("/proc")) -> str:
    """Return the id and name of the process that listens on a port, if this user may know it.

    Its command line is left out, because it may hold secrets.
    """
    listening = listening_sockets(processes)
    sockets = {name for name, found in listening.items() if found == port}
    for descriptor in processes.glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if str(descriptor.readlink()) in sockets:
                folder = descriptor.parents[1]
                return f"process {folder.name}, {(folder / 'comm').read_text().strip()}"
    return ""
