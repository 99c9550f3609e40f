"""Restore the process-wide settings that recorded calls change, after each module."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from slipstream.server.log.output import HANDLER, configure_log


@pytest.fixture(scope="module", autouse=True)
def restored_log_settings() -> Iterator[None]:
    before = HANDLER.settings
    yield
    configure_log(**asdict(before))
