"""The log line, which people's scripts read."""

import re
import time

import pytest

from slipstream.server.log import log as logging

LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [\w.]+:\d+\] .*")


@pytest.fixture
def greenwich():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("greenwich")
def test_the_form_is_tritons():
    moment = 1_731_708_085_210_518_999  # 15 November 2024, 22:01:25.210518 UTC
    line = logging.format_line(
        "I", "http_server.cc:4692", "Started HTTPService at 127.0.0.1:8000", moment, 1175
    )
    assert (
        line
        == "I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000"
    )


def test_a_line_goes_to_stderr_with_the_callers_place(capsys):
    logging.warning("look here")
    found = capsys.readouterr()
    assert found.out == ""
    assert LINE.fullmatch(found.err.rstrip("\n"))
    assert found.err.startswith("W")
    assert "test_lifecycle_log.py:" in found.err
    assert found.err.endswith("] look here\n")
