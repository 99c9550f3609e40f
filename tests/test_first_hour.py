"""The commands of docs/first-hour.md, in a new environment with an empty home.

    pytest -m slow -n0 -s tests/test_first_hour.py

It installs the package, fetches the default model, and uses the ports that the page names, so they
must be free: 8000 to 8002. It prints how long each path takes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from source_tree import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "first-hour.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"
START = "slipstream start"
SECONDS = 600.0  # of one command


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def commands(title: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", section(title), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkout and an environment, made by the commands of the page."""
    folder = tmp_path_factory.mktemp("first") / "checkout"
    kept = ("slipstream", "pyproject.toml", "README.md", "LICENSE")
    folder.mkdir()
    for name in kept:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for name in ("8000", "8001", "8002"):
        with socket.create_server(("127.0.0.1", int(name))):
            pass  # the commands of the page need it
    began = time.monotonic()
    python, activate, install = commands("Install")
    assert activate == ". venv/bin/activate"
    subprocess.run(python.replace("python3", sys.executable), shell=True, cwd=folder, check=True)
    subprocess.run(f"{activate} && {install}", shell=True, cwd=folder, check=True)
    report("Install", began)
    return folder


@pytest.fixture
def shell(environment: Path, tmp_path: Path) -> Shell:
    return Shell(environment / "venv" / "bin", tmp_path)


class Shell:
    """Terminals with the environment, an empty home and an empty folder."""

    def __init__(self, programs: Path, folder: Path) -> None:
        (folder / "home").mkdir()
        (folder / "work").mkdir()
        self.folder = folder / "work"
        hidden = ("SLIPSTREAM_", "HF_", "PYTHON", "VIRTUAL_ENV", "XDG_CACHE_HOME")
        self._variables = {
            name: value for name, value in os.environ.items() if not name.startswith(hidden)
        } | {"HOME": str(folder / "home"), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, command: str) -> str:
        finished = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
        return finished.stdout

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """Run a server in a terminal of its own, from its last line on."""
        log = self.folder.parent / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command.split(), cwd=self.folder, env=self._variables, stdout=output, stderr=output
            )
        try:
            wait_for(lambda: "API docs:" in log.read_text(), process)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_for(condition, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


def report(title: str, began: float) -> None:
    print(f"\n{title}: {time.monotonic() - began:.0f} s")


def test_terminal(shell: Shell) -> None:
    began = time.monotonic()
    start, infer, chat, status, stop = commands("Terminal")
    assert start == START
    with shell.running(start):
        assert "Tokyo" in shell.run(infer)
        report("Terminal, to the first answer", began)
        assert shell.run(chat).strip()
        assert "ready" in shell.run(status).splitlines()[0]
        shell.run(stop)
    report("Terminal", began)


def test_browser(shell: Shell) -> None:
    """The page itself is tested in a real browser by tests/server/test_page_browser.py."""
    began = time.monotonic()
    (start,) = commands("Browser")
    with shell.running(start):
        for url in re.findall(r"<(http[^>]+)>", section("Browser")):
            assert "<title>Slipstream" in httpx.get(url).text
        body = {
            "model": httpx.get(f"{ADDRESS}/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
            "temperature": 0,
        }
        answer = httpx.post(f"{ADDRESS}/v1/chat/completions", json=body, timeout=60).json()
        assert "Tokyo" in answer["choices"][0]["message"]["content"]
        report("Browser", began)


def test_python(shell: Shell) -> None:
    began = time.monotonic()
    (code,) = re.findall(r"```python\n(.*?)```", section("Python"), re.DOTALL)
    (shell.folder / "hello.py").write_text(code)
    (command,) = commands("Python")
    assert "Paris" in shell.run(command)
    report("Python", began)


def test_an_old_repository(shell: Shell) -> None:
    began = time.monotonic()
    *before, launch, ask, stop = commands("A Triton repository")
    for command in before:
        shell.run(command)
    # the server goes on in the background, and must not keep the pipes of this process open
    shell.run(f"{launch} > launch.log 2>&1")

    def ready() -> bool:
        try:
            return httpx.get(f"{ADDRESS}/v2/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(ready)
    try:
        assert "Paris" in shell.run(ask)
        report("A Triton repository", began)
    finally:
        shell.run(stop)
