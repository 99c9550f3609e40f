"""The format of log lines, which existing scripts parse, and the levels that are written."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from slipstream.server.log.formats import TritonFormatter, make_record
from slipstream.server.log.output import HANDLER, configure_log

LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [\w.]+:\d+\] .*")

logger = logging.getLogger("slipstream.test")


@pytest.fixture
def utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    before = HANDLER.settings
    yield
    configure_log(**asdict(before))


@pytest.mark.usefixtures("utc")
def test_lines_have_the_format_of_triton() -> None:
    record = make_record(
        logging.INFO,
        "Started HTTPService at 127.0.0.1:8000",
        place="http_server.cc:4692",
        time_us=1_731_708_085_210_518,  # 15 November 2024, 22:01:25.210518 UTC
        process=1175,
    )
    assert (
        TritonFormatter().format(record)
        == "I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000"
    )


def test_a_line_on_stderr_has_the_source_line_of_the_caller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger.warning("look here")
    found = capsys.readouterr()
    assert found.out == ""
    assert LINE.fullmatch(found.err.rstrip("\n"))
    assert found.err.startswith("W")
    assert "test_lifecycle_log.py:" in found.err
    assert found.err.endswith("] look here\n")


LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


class Costly:
    """An argument that counts how often it is formatted."""

    def __init__(self) -> None:
        self.formatted = 0

    def __str__(self) -> str:
        self.formatted += 1
        return "costly"


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({}, ["I", "W", "E"]),
        ({"verbose_level": 1}, ["I", "I", "W", "E"]),
        ({"info": False}, ["W", "E"]),
        ({"warning": False}, ["I", "E"]),
        ({"info": False, "error": False}, ["W"]),
        ({"info": False, "verbose_level": 1}, ["I", "W", "E"]),
        ({"info": False, "warning": False, "error": False}, []),
    ],
)
def test_each_level_has_its_own_switch_and_disabled_levels_format_nothing(
    capsys: pytest.CaptureFixture[str], settings: dict[str, bool | int], written: list[str]
) -> None:
    configure_log(**settings)
    for level in LEVELS:
        logger.log(level, "a line")
    assert [line[0] for line in capsys.readouterr().err.splitlines()] == written
    costly = Costly()
    for level in LEVELS:
        HANDLER.handle(logging.LogRecord("a", level, "a.py", 1, "%s", (costly,), None))
    assert costly.formatted == len(written)


@pytest.mark.parametrize(
    ("settings", "lowest"),
    [
        ({}, logging.INFO),
        ({"verbose_level": 2}, logging.DEBUG),
        ({"info": False}, logging.WARNING),
        ({"info": False, "warning": False}, logging.ERROR),
        ({"info": False, "warning": False, "error": False}, None),
    ],
)
def test_loggers_skip_the_levels_that_are_switched_off(
    settings: dict[str, bool | int], lowest: int | None
) -> None:
    configure_log(**settings)
    enabled = [level for level in LEVELS if logger.isEnabledFor(level)]
    assert enabled == [level for level in LEVELS if lowest is not None and level >= lowest]
