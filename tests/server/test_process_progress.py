"""The progress of an engine's start: a bar on a terminal, a log line each quarter elsewhere."""

import io
import logging
import sys

from slipstream.engine_worker.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_for_each_phase(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for done in (1, 2):
        show_progress("compiling kernels", done, 2)
    show_progress("capturing decode steps", 1, 10)
    bars = terminal.getvalue().replace("\n", "").split("\r")[1:]
    assert bars == [
        f"  compiling kernels        [{'#' * 15:<30}] 1/2",
        f"  compiling kernels        [{'#' * 30:<30}] 2/2",
        f"  capturing decode steps   [{'#' * 3:<30}] 1/10",
    ]
    assert terminal.getvalue().count("\n") == 1, "only a complete bar ends its line"


def test_a_log_gets_a_line_each_quarter(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO):
        for done in range(1, 31):
            show_progress("compiling kernels", done, 30)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling kernels: {done} of 30" for done in (8, 15, 23, 30)
    ]
