"""The progress of an engine's start: log lines, also on a terminal."""

import io
import logging
import sys

import pytest

from slipstream.engine_worker.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("output", [Terminal, io.StringIO])
def test_a_phase_gets_a_line_each_quarter(monkeypatch, caplog, output):
    stderr = output()
    monkeypatch.setattr(sys, "stderr", stderr)
    with caplog.at_level(logging.INFO):
        for done in range(1, 31):
            show_progress("compiling kernels", done, 30)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling kernels: {done} of 30" for done in (8, 15, 23, 30)
    ]
    assert "\r" not in stderr.getvalue()


def test_a_phase_of_one_step_is_begun_and_done(caplog):
    with caplog.at_level(logging.INFO):
        show_progress("compiling CPU kernels", 0, 1)
        show_progress("compiling CPU kernels", 1, 1)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["compiling CPU kernels", "compiling CPU kernels: done"]
