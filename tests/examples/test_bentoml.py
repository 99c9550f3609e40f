"""The BentoML service of examples/, called over HTTP as its README says."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from client_environment import environment
from free_ports import free_ports
from real_server import ROOT
from test_examples import folder, generate, model, server  # noqa: F401  (fixtures)

SERVICE = ROOT / "examples" / "bentoml" / "service.py"

pytestmark = pytest.mark.clients


def test_the_service_streams_the_text(server, tmp_path: Path):  # noqa: F811
    python = environment("example-bentoml", ["bentoml", "tritonclient[grpc]"])
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [python.with_name("bentoml"), "serve", f"{SERVICE}:Writer", "--port", str(port)],
        env=os.environ
        | {"TRITON_URL": server.grpc, "BENTOML_HOME": str(tmp_path), "DO_NOT_TRACK": "1"},
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/readyz", process)
        body = {"prompt": "Once", "max_tokens": 10}
        answer = httpx.post(f"http://127.0.0.1:{port}/write", json=body, timeout=60)
        assert (answer.status_code, answer.text) == (200, generate(server, "Once", 10))
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it has not opened its port
        time.sleep(0.2)
    raise AssertionError(f"{url} is not ready")
