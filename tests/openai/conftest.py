"""A server for the tests of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_server import Serving, running


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with running(tmp_path_factory.mktemp("openai")) as serving:
        yield serving
