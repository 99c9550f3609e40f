"""Logs that cannot be written, lines that cannot be read, and crashes of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from free_ports import free_ports
from tiny_server import TinyServer, make_repository, wait_for

from slipstream.server.log.capture import MAX_LINE_BYTES, LineSplitter, Relay
from slipstream.server.log.formats import RelayFormatter, make_record, read_relayed
from slipstream.server.log.output import HANDLER, configure_log
from slipstream.server.python_models.instance import Instance

logger = logging.getLogger("slipstream.test")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    before = HANDLER.settings
    yield
    configure_log(**asdict(before))


# -- logs that cannot be written


async def test_a_full_disk_loses_lines_and_stops_nothing(tmp_path: Path) -> None:
    configure_log(file="/dev/full")
    done = asyncio.get_running_loop().create_future()

    def log_line() -> None:
        logger.info("a line that has no room")
        done.set_result("went on")

    asyncio.get_running_loop().call_soon(log_line)
    assert await asyncio.wait_for(done, 1) == "went on"
    # the unwritten rest of the old file does not prevent a new one
    configure_log(file=str(tmp_path / "log"))
    logger.info("a line with room", extra={"place": "here"})
    assert (tmp_path / "log").read_text().endswith(" here] a line with room\n")


def test_a_server_whose_output_is_on_a_full_disk_serves(tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    full = Path("/dev/full")
    server = TinyServer(make_repository(tmp_path), tmp_path / "tmp", *ports, output=full)
    try:
        wait_for(lambda: is_ready(http) or server.process.poll() is not None)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    finally:
        server.close()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("closed", [True, False])
def test_logging_to_a_closed_or_broken_stream_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w", encoding="utf-8")  # noqa: SIM115
    if closed:
        with pytest.raises(BrokenPipeError):
            print("text", file=stream, flush=True)
        with pytest.raises(BrokenPipeError):
            stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    logger.error("lost line")
    HANDLER.write_console(logging.ERROR, "another lost line")
    monkeypatch.undo()
    assert stream.closed is closed
    if not closed:
        with pytest.raises(BrokenPipeError):  # the buffer still holds the line
            stream.close()


def test_text_that_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    configure_log(file=str(tmp_path / "log"))
    HANDLER.write_line("a file \udcff")
    assert (tmp_path / "log").read_text() == "a file \\udcff\n"


def test_a_message_that_does_not_fit_its_arguments_does_not_raise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    HANDLER.handle(logging.LogRecord("a", logging.ERROR, "a.py", 1, "%d things", ("x",), None))
    assert "Arguments: ('x',)" in capsys.readouterr().err


def test_the_log_file_changes_only_between_lines(tmp_path: Path) -> None:
    """A writer holds the lock, so that no line goes to a file that was just closed."""
    exchange = threading.Thread(
        target=configure_log, kwargs={"file": str(tmp_path / "log")}, daemon=True
    )
    HANDLER.acquire()
    exchange.start()
    exchange.join(0.1)
    found = (HANDLER.settings.file, exchange.is_alive())
    HANDLER.release()
    assert found == ("", True)
    exchange.join(10)
    assert HANDLER.settings.file == str(tmp_path / "log")


# -- lines that cannot be read

GOOD_FIELDS = {
    "level": "info",
    "message": "m",
    "place": "",
    "time_us": 1,
    "process": 1,
    "model": "",
    "request_id": "",
}
BAD_VALUES: list[tuple[str, object]] = [
    ("level", "loud"),
    ("level", ["info"]),
    ("message", 1),
    ("time_us", "soon"),
    ("time_us", 1.5),
    ("time_us", -1),
    ("time_us", 99999999999999999999999999999),
    ("process", None),
    ("process", True),
    ("model", {}),
    ("unknown", 1),
]
INVALID_RECORDS = [
    *(json.dumps(GOOD_FIELDS | {name: value}) for name, value in BAD_VALUES),
    json.dumps(GOOD_FIELDS)[:-1] + ', "time_us": 1e400}',
    "[]",
    "[" * 100_000,
]


def test_a_line_with_all_fields_is_a_record() -> None:
    record = read_relayed("\x1e" + json.dumps(GOOD_FIELDS))
    assert record is not None
    assert (record.levelno, record.getMessage(), record.created) == (logging.INFO, "m", 1e-6)


@pytest.mark.parametrize("text", INVALID_RECORDS, ids=range(len(INVALID_RECORDS)))
def test_a_line_with_wrong_fields_is_not_a_record(text: str) -> None:
    assert read_relayed(f"\x1e{text}") is None


def test_records_after_an_invalid_line_are_read(tmp_path: Path) -> None:
    configure_log(file=str(tmp_path / "log"), format="json")
    reading, writing = os.pipe()
    relay = Relay(reading, 7, logging.WARNING)
    good = RelayFormatter().format(make_record(logging.INFO, "good"))
    lines = [f"\x1e{text}" for text in INVALID_RECORDS[:-1]]
    os.write(writing, "\n".join([*lines, good, ""]).encode())
    os.close(writing)
    relay.finish(10)
    logged = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    assert logged == [*lines, "good"]  # unchanged


# -- lines


def test_lines_are_split_independently_of_the_chunks() -> None:
    text = "one\r\n\ntwo \u20ac\nthree".encode()
    for size in (1, 2, 3, 7, len(text)):
        cutter = LineSplitter()
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        found = [line for part in [*parts, b""] for line in cutter.push(part)]
        assert found == ["one", "", "two \u20ac", "three"]
    assert LineSplitter().push(b"") == []


def test_a_line_without_an_end_is_returned_in_pieces() -> None:
    cutter = LineSplitter()
    pieces = [piece for _ in range(40) for piece in cutter.push(b"x" * 10_000)]
    assert [len(piece) for piece in pieces] == [MAX_LINE_BYTES] * 6
    assert cutter.push(b"\nnext\n") == ["x" * (400_000 - 6 * MAX_LINE_BYTES), "next"]


def test_pieces_do_not_split_characters() -> None:
    euros = "\u20ac" * 30_000  # three bytes each
    pieces = LineSplitter().push(euros.encode() + b"\n")
    assert [len(piece.encode()) for piece in pieces] == [
        MAX_LINE_BYTES - 1,
        90_001 - MAX_LINE_BYTES,
    ]
    assert "".join(pieces) == euros
    assert LineSplitter().push(b"x" * MAX_LINE_BYTES + b"\n") == ["x" * MAX_LINE_BYTES]
    assert [len(piece) for piece in LineSplitter().push(b"\x80" * MAX_LINE_BYTES + b"\x80\n")] == [
        MAX_LINE_BYTES,
        1,
    ]


def test_both_readers_bound_the_memory_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(HANDLER, "write_line", logged.append)
    monkeypatch.setattr(HANDLER, "format", logging.LogRecord.getMessage)
    (tmp_path / "output").write_bytes(b"x" * (2 * MAX_LINE_BYTES + 1))
    relayed = os.open(tmp_path / "output", os.O_RDONLY)
    Relay(relayed, 7, logging.WARNING).finish(10)
    assert [len(text) for text in logged] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 1]
    logged.clear()
    instance = Instance("noisy_0", "noisy", 1, None, *[lambda *_: None] * 3)  # type: ignore[arg-type]
    with (tmp_path / "output").open("rb") as output:
        for _ in range(3):
            instance._read_output(None, output.fileno())  # type: ignore[arg-type]
    assert [len(text) for text in logged] == [MAX_LINE_BYTES, MAX_LINE_BYTES]


# -- a crash of the server's own process

CRASHING_SERVER = """
import ctypes, os, sys
import logging
from slipstream.server.log.capture import capture_output
from slipstream.server.log.output import configure_log
configure_log(format="json")
def fall():
    ctypes.PyDLL(None).write(2, b"y" * 300_000, 300_000)  # while it holds the interpreter's lock
    os.kill(os.getpid(), int(sys.argv[1]))
with capture_output():
    logging.getLogger("slipstream").info("before")
    fall()
"""


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted")]
)
def test_the_stack_of_a_crash_is_written_as_plain_lines(number: int, words: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CRASHING_SERVER, str(int(number))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert result.returncode == -number
    assert f"Fatal Python error: {words}\n" in result.stderr
    assert " in fall\n" in result.stderr
    assert json.loads(result.stderr.splitlines()[0])["message"] == "before"


def test_faulthandler_is_restored_after_the_server() -> None:
    code = (
        "import faulthandler, sys; from slipstream.server.log.output import configure_log\n"
        "from slipstream.server.log.capture import capture_output\n"
        "configure_log(format='json')\nfor enabled in (False, True):\n"
        " faulthandler.enable() if enabled else faulthandler.disable()\n with capture_output():\n"
        "  assert faulthandler.is_enabled()\n print(faulthandler.is_enabled())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (result.stdout, result.stderr) == ("False\nTrue\n", "")
