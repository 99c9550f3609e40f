"""What the recorded calls change for the whole process is changed back, module by module."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from slipstream.server.log.output import HANDLER, configure_log


@pytest.fixture(scope="module", autouse=True)
def log_settings_as_they_were() -> Iterator[None]:
    before = HANDLER.settings
    yield
    configure_log(**asdict(before))
