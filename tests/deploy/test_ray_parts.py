"""The parts of the deployment for Ray Serve that need no Ray: scaling, and requests passed on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import httpx
import pytest
from manifests import ROOT
from real_server import limit_cache
from starlette.requests import Request
from tiny_engine import build_tiny_engine
from tiny_server import children_of, command_of, is_running, wait_for

from slipstream.ray.forwarding import Forwarder
from slipstream.ray.scaling import CAPACITY, replicas_by_capacity
from slipstream.ray.server_process import (
    ServerFailed,
    ServerProcess,
    launch_variables,
    meeting_variables,
)
from slipstream.repository.templates import write_repository


def context(capacities: list[float] | None, requests: float = 0, target: int = 1) -> object:
    found = {} if capacities is None else {CAPACITY: dict(enumerate(capacities))}
    return SimpleNamespace(
        aggregated_metrics=found, total_num_requests=requests, target_num_replicas=target
    )


@pytest.mark.parametrize(
    ("capacities", "requests", "replicas"),
    [
        ([10.0], 8, 1.0),
        ([10.0], 40, 5.0),
        ([10.0, 10.0], 4, 0.5),
        ([10.0, 30.0], 32, 2.0),  # their mean counts
        ([10.0], 0, 0.0),
    ],
)
def test_replicas_run_eight_tenths_of_what_they_can_at_once(capacities, requests, replicas):
    assert replicas_by_capacity(context(capacities, requests)) == (pytest.approx(replicas), {})


@pytest.mark.parametrize("capacities", [None, [], [0.0]])
def test_without_a_replica_that_has_started_the_number_stays(capacities):
    assert replicas_by_capacity(context(capacities, 100, target=3)) == (3, {})


def test_before_the_first_statistics_the_number_stays():
    empty = SimpleNamespace(aggregated_metrics=None, total_num_requests=7, target_num_replicas=2)
    assert replicas_by_capacity(empty) == (2, {})


class Server:
    """A server of one response, which keeps the request that it got."""

    def __init__(self, response: bytes, hold: bool = False) -> None:
        """hold: keep the connection open after the response, until the client leaves"""
        self._response = response
        self._hold = hold
        self.request = b""
        self.left = asyncio.Event()  # the client has closed the connection

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        self.request = head + await reader.readexactly(int(lines.get(b"content-length", 0)))
        writer.write(self._response)
        await writer.drain()
        if self._hold:
            assert await reader.read() == b""
            self.left.set()
        writer.close()


def request(
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    root: str = "",
) -> Request:
    """Return a request as Ray Serve passes it on."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": root,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(scope, receive)


@pytest.fixture
async def forward() -> AsyncIterator[Callable[[str], Forwarder]]:
    started: list[Forwarder] = []

    def start(url: str) -> Forwarder:
        started.append(Forwarder(url))
        return started[-1]

    yield start
    for forwarder in started:
        await forwarder.close()


async def pieces_of(response: object) -> AsyncIterator[bytes]:
    async for piece in response.body_iterator:  # type: ignore[attr-defined]
        yield piece


CREATED = (
    b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX-Own: 1\r\nX-Own: 2\r\nConnection: close\r\n"
    b"Content-Type: text/plain; charset=latin-1\r\n\r\nh\xe9llo"
)


async def test_method_path_query_headers_and_body_are_passed_on_and_the_response_back(forward):
    async with Server(CREATED) as server:
        headers = {
            "host": "outside",
            "content-length": "4",
            "authorization": "Bearer a",
            "te": "trailers",
        }
        sent = request("POST", "/v2/a b/%41?x=%20&y", b'{"a"', headers)
        response = await forward(server.url).forward(sent)
        body = b"".join([piece async for piece in pieces_of(response)])
    assert (response.status_code, body) == (201, b"h\xe9llo")
    assert [pair for pair in response.raw_headers if pair[0] == b"x-own"] == [
        (b"x-own", b"1"),
        (b"x-own", b"2"),
    ]
    assert (b"content-type", b"text/plain; charset=latin-1") in response.raw_headers
    assert b"connection" not in dict(response.raw_headers)
    head, _, content = server.request.partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    assert line == b"POST /v2/a%20b/%2541?x=%20&y HTTP/1.1"
    assert content == b'{"a"'
    found = {entry.lower() for entry in lines}
    assert b"authorization: bearer a" in found
    assert f"host: {server.url.removeprefix('http://')}".encode() in found
    assert not any(entry.startswith((b"te:", b"user-agent:", b"accept")) for entry in found)


async def test_the_route_of_the_application_is_no_part_of_the_path(forward):
    async with Server(b"HTTP/1.1 204 No Content\r\n\r\n") as server:
        sent = request("GET", "/llm/v2/health/ready", root="/llm")
        assert (await forward(server.url).forward(sent)).status_code == 204
    assert server.request.startswith(b"GET /v2/health/ready HTTP/1.1\r\n")


async def test_a_piece_of_a_stream_is_passed_on_before_its_end_and_a_client_that_leaves_is_noticed(
    forward,
):
    event = b"data: 1\n\n"
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n" + event + b"\r\n"
    async with Server(response, hold=True) as server, asyncio.timeout(30):
        found = await forward(server.url).forward(request("GET", "/"))
        assert b"transfer-encoding" not in dict(found.raw_headers)
        pieces = found.body_iterator
        assert await anext(pieces) == event
        assert not server.left.is_set()
        await pieces.aclose()
        await server.left.wait()


async def test_the_processes_of_a_replica_on_two_nodes_serve_together(tmp_path):
    """As its two actors start them. Here srun has started Ray, on this machine and another."""
    engine = build_tiny_engine(tmp_path)
    write_repository(tmp_path / "repository", "tiny", engine, engine, 64)
    limit_cache(tmp_path / "repository", 4096)
    flags = [f"--model-repository={tmp_path / 'repository'}", "--ranks=2", "--frontends=1"]
    shared = meeting_variables("127.0.0.2") | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    places = [launch_variables(rank, 2, "group") for rank in range(2)]
    server, other = (ServerProcess(flags, 5.0, shared | place) for place in places)
    try:
        server.wait_started(120)
        other.check_running()
        body = {"text_input": "5 6 7", "max_tokens": 8, "end_id": 95}
        async with httpx.AsyncClient(timeout=60) as client:
            found = await client.post(f"{server.url}/v2/models/tiny/generate", json=body)
        assert len(found.json()["text_output"].split()) == 8
        for process in (server, other):
            (engine_process,) = children_of(process.process_id)
            assert "engine_worker.process" in command_of(engine_process)
    finally:
        await server.stop()
    wait_for(lambda: not is_running(other.process_id))
    with pytest.raises(ServerFailed, match="exit code 0"):
        other.check_running()


async def test_a_server_that_does_not_respond_is_a_503_with_the_reason(forward):
    async with Server(b"") as server:
        address = server.url
    answer = await forward(address).forward(request("GET", "/v2/health/live"))
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    error = json.loads(answer.body)["error"]
    assert error.startswith("the server of this replica did not respond: ")
