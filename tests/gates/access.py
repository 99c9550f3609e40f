"""Each route with no key, a wrong one, a user's and the admin's, over both protocols."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from http_support import Connection, RunningServer, request_bytes

from gates.access_matrix import GRPC, HTTP, OPEN, PROBE, USER
from gates.foreign_page import foreign_page
from gates.key_timing import compare_times
from gates.table import Row
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server, create_handlers
from slipstream.server.grpc.transport import Streaming
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.openai.routes import OpenAIRoutes
from slipstream.server.services import create_app, create_context

KEYS = {"none": "", "wrong": "wrong-key", "user": "user-key", "admin": "admin-key"}
_ACCESS = Access(api_key=KEYS["user"], admin_key=KEYS["admin"])
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
_VALUES = {"version": "1", "kind": "system", "rest": "x", "id": "resp_0"}
_REFUSED = (401, 403)
_CODES = {grpc.StatusCode.UNAUTHENTICATED: 401, grpc.StatusCode.PERMISSION_DENIED: 403}
# Spellings of a protected path, and of files of this machine.
_TRICKS = (
    "/page/../v2/logging",
    "/docs/../v2/logging",
    "/v2/health/live/../../logging",
    "//v2/logging",
    "/v2//logging",
    "/v2/logging/",
    "/V2/LOGGING",
    "/v2/%6cogging",
    "/v2/logging;x",
    "/v2/logging?x=/v2/health/live",
    "/v2/logging#/v2/health/live",
    "/v2/logging%00",
    "/v2/logging%2f..%2fhealth%2flive",
    "http://localhost/v2/logging",
    "http://localhost/v2/health/live/../../logging",
    "/page/../../../../../../etc/passwd",
    "/page/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
    "/page/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "/page//etc/passwd",
    "/page/....//....//etc/passwd",
    "/page/..\\..\\etc\\passwd",
    "/docs/../../etc/passwd",
    "/../../etc/passwd",
    "file:///etc/passwd",
)
# Names of models that would be files outside of the repository.
_NAMES = ("..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd", "a%00b", "a%2f..%2fb", "~root")


@dataclass(frozen=True)
class _Service:
    http: int
    grpc: str
    paths: tuple[str, ...]  # of the table of the HTTP port, as written there
    calls: Mapping[str, bool]  # of gRPC, by path: whether it is a stream


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """`long`: also the time that the comparison of keys takes."""
    rows += await asyncio.to_thread(_run_matrix)
    rows.append(await asyncio.to_thread(foreign_page, folder))
    if long:
        rows.append(await asyncio.to_thread(compare_times))


def _run_matrix() -> list[Row]:
    registry = ModelRegistry()
    state = ServerState([])
    context = create_context(access=_ACCESS)
    metrics = ServerMetrics()
    app = create_app(registry, state, context, metrics, metrics)
    endpoints = OpenAIRoutes(registry, state, context)._endpoints
    listed = {route.path for _, route in app._table} - {"/v1/{rest}"}
    paths = sorted(listed | {endpoint.path for endpoint in endpoints})
    calls = {
        path: isinstance(handler, Streaming)
        for path, handler in create_handlers(registry, state, context).items()
    }
    with RunningServer(app) as server:
        loop = server.loop
        assert loop is not None

        async def start_grpc() -> tuple[object, str]:
            options = GrpcOptions()
            running = create_grpc_server(registry, state, context, options)
            port = add_port(running, "127.0.0.1:0", options)
            await running.start()
            return running, f"127.0.0.1:{port}"

        running, address = asyncio.run_coroutine_threadsafe(start_grpc(), loop).result(20)
        try:
            service = _Service(server.port, address, tuple(paths), calls)
            return [
                _listed(service),
                _http_matrix(service),
                _grpc_matrix(service),
                _tricks(service),
                _names(service),
            ]
        finally:
            asyncio.run_coroutine_threadsafe(running.stop(None), loop).result(20)


def _listed(service: _Service) -> Row:
    """A new route must say who may use it: in access_matrix.py."""
    found = set(service.paths) | set(service.calls)
    expected = set(HTTP) | set(GRPC)
    missing = sorted(found - expected)
    gone = sorted(expected - found)
    text = f"{len(service.paths)} HTTP paths and {len(service.calls)} gRPC methods"
    for what, names in (("not in the matrix", missing), ("not served", gone)):
        if names:
            text += f"; {what}: {', '.join(names)}"
    return Row("every route is in the matrix", text, not missing and not gone)


def _spellings(path: str) -> Iterator[str]:
    """Return a path with and without its optional parts, with values for its parameters."""
    for kept in (r"\1", ""):
        plain = re.sub(r"\[([^\]]*)\]", kept, path)
        yield re.sub(r"\{(\w+)\}", lambda name: _VALUES.get(name[1], "m"), plain)


def allowed(kind: str, key: str) -> bool:
    """Return whether a key opens a route of this kind."""
    if kind in (OPEN, PROBE):
        return True
    return key == "admin" or (key == "user" and kind == USER)


def _http_matrix(service: _Service) -> Row:
    calls = 0
    wrong = []
    for path in service.paths:
        kind = HTTP.get(path, "")
        for target in dict.fromkeys(_spellings(path)):
            for method in _METHODS:
                for key in KEYS:
                    calls += 1
                    status = _ask(service.http, method, target, KEYS[key])
                    if (status not in _REFUSED) != allowed(kind, key):
                        wrong.append(f"{method} {target} with {key} key: {status}")
    return Row("HTTP: route × method × key", _text(calls, wrong), not wrong)


def _ask(port: int, method: str, target: str, key: str) -> int:
    headers = [["Authorization", f"Bearer {key}"]] if key else []
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    with Connection(port) as connection:
        connection.send(request_bytes(method, target, headers, body))
        answer = connection.answer(head_only=True)
        return 0 if answer is None else answer.status


def _grpc_matrix(service: _Service) -> Row:
    calls = 0
    wrong = []
    with grpc.insecure_channel(service.grpc) as channel:
        for path, streams in service.calls.items():
            for key in KEYS:
                calls += 1
                status = _call(channel, path, streams, KEYS[key])
                if (status not in _REFUSED) != allowed(GRPC.get(path, ""), key):
                    wrong.append(f"{path} with {key} key: {status}")
    return Row("gRPC: method × key", _text(calls, wrong), not wrong)


def _call(channel: grpc.Channel, path: str, streams: bool, key: str) -> int:
    """Return 401 or 403 if the call is refused, else 200, whatever it answers."""
    metadata = [("authorization", f"Bearer {key}")] if key else []
    try:
        if streams:
            call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=20)
            next(call, None)
            call.cancel()
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=20)
    except grpc.RpcError as error:
        return _CODES.get(error.code(), 200)
    return 200


def _text(calls: int, wrong: list[str]) -> str:
    text = f"{calls} calls, {len(wrong)} against the matrix"
    return f"{text}: {'; '.join(wrong[:5])}" if wrong else text


def _tricks(service: _Service) -> Row:
    wrong = []
    for target in _TRICKS:
        for method in ("GET", "POST"):
            received = _send_raw(service.http, f"{method} {target} HTTP/1.1")
            status = int(received.split()[1]) if received else 0
            if status not in (0, 400, 401, 403, 404, 405) or b"root:" in received:
                wrong.append(f"{method} {target}: {status}")
    return Row("other spellings of paths, and files", _text(2 * len(_TRICKS), wrong), not wrong)


def _send_raw(port: int, line: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        head = f"{line}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    return received


def _names(service: _Service) -> Row:
    """With the admin key: names are not read as paths."""
    wrong = []
    for name in _NAMES:
        for work in ("load", "unload"):
            target = f"/v2/repository/models/{name}/{work}"
            status = _ask(service.http, "POST", target, KEYS["admin"])
            if status not in (400, 404, 503):
                wrong.append(f"{target}: {status}")
    return Row("names of models that are paths", _text(2 * len(_NAMES), wrong), not wrong)
