"""A server for the tests of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_server import Serving, running


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with running(tmp_path_factory.mktemp("anthropic")) as serving:
        yield serving
