"""Generated wrong requests get the answers of a real Triton, or differ as the list says.

The recordings are of the real server, with Python models. Here most of those models are classes of
the test process; three are the recorded code itself, for errors that their processes report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bad_requests.differences import GRPC_DIFFERENCES, HTTP_DIFFERENCES
from bad_requests.grpc_answers import GrpcSender
from bad_requests.grpc_cases import grpc_cases
from bad_requests.http_answers import HttpSender
from bad_requests.http_cases import http_cases
from bad_requests.recordings import Difference, compare, read_recording
from bad_requests.servers import Ports, our_server, write_repository
from fixed_models import FixedModels
from grpc_support import MAKERS

from slipstream.server.python_models.factory import PythonModels

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-triton.md"
_OWN_CODE = ("seq", "llm", "llm_nd")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    makers = {name: maker for name, maker in MAKERS.items() if name not in _OWN_CODE}
    makers["spare"] = makers["raw1"]
    repository = write_repository(tmp_path_factory.mktemp("errors") / "models")
    with our_server(repository, [FixedModels(makers), PythonModels()]) as ports:
        yield ports


def test_http_answers_are_those_of_triton(server: Ports) -> None:
    cases = http_cases()
    assert len(cases) > 2000
    sender = HttpSender(server.http)
    answers = [sender.send(case) for case in cases]
    sender.close()
    recorded = read_recording("errors_http", cases)
    assert compare(cases, recorded, answers, HTTP_DIFFERENCES) == []


def test_grpc_answers_are_those_of_triton(server: Ports) -> None:
    cases = grpc_cases()
    assert len(cases) > 2000
    sender = GrpcSender(server.grpc)
    answers = [sender.send(case) for case in cases]
    sender.close()
    recorded = read_recording("errors_grpc", cases)
    assert compare(cases, recorded, answers, GRPC_DIFFERENCES) == []


@pytest.mark.parametrize("differences", [HTTP_DIFFERENCES, GRPC_DIFFERENCES])
def test_differences_are_documented(differences: Sequence[Difference]) -> None:
    page = PAGE.read_text("utf-8")
    missing = {entry.reason for entry in differences if entry.reason not in page}
    assert missing == set()
