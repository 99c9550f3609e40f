"""Restore the process-wide settings that recorded calls change, after each module."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest
from real_triton import VARIABLE, find_tritonserver

from slipstream.server.log.output import HANDLER, configure_log


@pytest.fixture(scope="module", autouse=True)
def restored_log_settings() -> Iterator[None]:
    before = HANDLER.settings
    yield
    configure_log(**asdict(before))


@pytest.fixture(scope="module", autouse=True)
def real_tritonserver(request: pytest.FixtureRequest) -> None:
    """Fail, and do not skip, if a live test is selected without the real server."""
    live = any(mark.name == "live" for mark in request.node.own_markers)
    if live and find_tritonserver() is None:
        pytest.fail(f"pip install nvidia-pytriton, or set {VARIABLE} to a tritonserver")
