"""A real Triton and this server answer the generated wrong requests alike, except for the list.

Needs a Triton; see `test_live_triton.py`. The real server is started again where a request ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bad_requests.differences import GRPC_DIFFERENCES, HTTP_DIFFERENCES
from bad_requests.grpc_answers import GrpcSender
from bad_requests.grpc_cases import grpc_cases
from bad_requests.http_answers import HttpSender
from bad_requests.http_cases import http_cases
from bad_requests.recordings import Case, Difference, compare, read_recording
from bad_requests.servers import Ports, RealAnswers, Sender, our_server, write_repository
from real_triton import find_tritonserver

from slipstream.server.python_models.factory import PythonModels

TRITONSERVER = find_tritonserver()
pytestmark = pytest.mark.live


class Protocol(NamedTuple):
    cases: Sequence[Case]
    connect: Callable[[Ports], Sender[Any]]
    recording: str
    differences: Sequence[Difference]


PROTOCOLS = {
    "http": Protocol(
        http_cases(), lambda ports: HttpSender(ports.http), "errors_http", HTTP_DIFFERENCES
    ),
    "grpc": Protocol(
        grpc_cases(), lambda ports: GrpcSender(ports.grpc), "errors_grpc", GRPC_DIFFERENCES
    ),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = write_repository(tmp_path_factory.mktemp("ours") / "models")
    with our_server(repository, [PythonModels()]) as ports:
        yield ports


@pytest.mark.parametrize("name", PROTOCOLS)
def test_both_servers_answer_alike(ours: Ports, tmp_path: Path, name: str) -> None:
    protocol = PROTOCOLS[name]
    assert TRITONSERVER is not None
    real = RealAnswers(TRITONSERVER, tmp_path).send_all(
        protocol.cases,
        lambda server: protocol.connect(Ports(server.http_port, server.grpc_port)),
    )
    sender = protocol.connect(ours)
    found = [sender.send(case) for case in protocol.cases]
    sender.close()
    assert compare(protocol.cases, real, found, protocol.differences) == []
    recorded = read_recording(protocol.recording, protocol.cases)
    assert compare(protocol.cases, recorded, real, ()) == []
