"""A real Triton serves the same models as this server after loads and unloads.

Needs a Triton; see `test_live_triton.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dependent_models import BROKEN, CODE, SCENARIOS, Step, write_repository
from http_support import post
from real_triton import RealTriton, find_tritonserver

TRITONSERVER = find_tritonserver()
pytestmark = pytest.mark.live
_SETTLED = ("READY", "UNAVAILABLE", None)


class RealModels:
    def __init__(self, port: int, repository: Path) -> None:
        self._port = port
        self._repository = repository

    def states(self) -> dict[str, dict[str, str]]:
        """Return the rows of the index by model, when no model is being unloaded."""
        while True:
            rows = json.loads(post(self._port, "/v2/repository/index", b"").body)
            if all(row.get("state") in _SETTLED for row in rows):
                return {row["name"]: row for row in rows}
            time.sleep(0.1)

    def perform(self, step: Step) -> None:
        if step.action in ("break", "repair"):
            time.sleep(1.1)  # the server compares the times of files in seconds
            file = self._repository / step.model / "1" / "model.py"
            file.write_text(BROKEN if step.action == "break" else CODE)
            return
        action = "load" if step.action == "load" else "unload"
        dependents = json.dumps(
            {"parameters": {"unload_dependents": step.action.endswith("dependents")}}
        )
        body = b"" if action == "load" else dependents.encode()
        post(self._port, f"/v2/repository/models/{step.model}/{action}", body)


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def models(tmp_path: Path) -> Iterator[RealModels]:
    assert TRITONSERVER is not None
    repository = write_repository(tmp_path / "models")
    option = "--model-control-mode=explicit"
    with RealTriton(TRITONSERVER, repository, tmp_path, option) as server:
        yield RealModels(server.http_port, repository)


def test_real_server_has_the_recorded_states(models: RealModels, scenario: str) -> None:
    for step in SCENARIOS[scenario]:
        models.perform(step)
        states = models.states()
        ready = [name for name, row in states.items() if row.get("state") == "READY"]
        assert ready == step.ready.split(), step
        for row in states.values():
            broken = row["name"] == "a" and row.get("reason", "").startswith("Internal: ")
            assert broken or row.get("reason", "unloaded") == "unloaded"
