"""Files of a repository that are damaged: the server names the problem in a line, or serves."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tiny_server
from tiny_server import make_repository

from gates.table import Row

_MOST_SECONDS = 10.0  # of a start, whose usual time on a busy machine is one to three
_MOST_MIB = 512
_LONGEST_LINE = 4000
_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
_CHANCE = random.Random(7)


def _json(change: Callable[[dict[str, object]], None]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        try:
            document = json.loads(content)
        except ValueError:
            return b"{" + content
        change(document)
        return json.dumps(document).encode()

    return damage


def _flip(content: bytes) -> bytes:
    """Return the content with twenty bytes changed."""
    changed = bytearray(content)
    for _ in range(min(20, len(changed))):
        changed[_CHANCE.randrange(len(changed))] = _CHANCE.randrange(256)
    return bytes(changed)


def _set_all(value: object) -> Callable[[bytes], bytes]:
    return _json(lambda document: document.update(dict.fromkeys(document, value)))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "bytes changed": _flip,
    "nested 100,000 deep": lambda content: b"[" * 100_000,
    "braces": lambda content: b"a {" * 100_000,
    "zeros": lambda content: bytes(len(content)),
    "not UTF-8": lambda content: b"\xff\xfe" + content,
    "another format": lambda content: b"PK\x03\x04" + content,
    "without the last byte": lambda content: content[:-1],
    "twice": lambda content: content * 2,
    "10 MB of blanks": lambda content: b" " * 10_000_000 + content,
    "10 MB of one word": lambda content: b'"' + b"a" * 10_000_000 + b'"',
    "huge numbers": lambda content: content.replace(b"1", b"9" * 400),
    "negative numbers": lambda content: content.replace(b"1", b"-1"),
    "null": lambda content: b"null",
    "a list": lambda content: b"[]",
    "all members null": _set_all(None),
    "all members texts": _set_all("x"),
    "all members lists": _set_all([]),
    "no members": _json(lambda document: document.clear()),
}
_QUICK = ("empty", "bytes changed", "nested 100,000 deep", "all members null")


@dataclass
class _Run:
    code: int | None  # None: it served
    lines: list[str]
    seconds: float
    mebibytes: float

    def problem(self) -> str:
        """Return what does not hold, or nothing."""
        if any("Traceback" in line for line in self.lines):
            return "a traceback"
        longest = max((len(line) for line in self.lines), default=0)
        if longest > _LONGEST_LINE:
            return f"a line of {longest} characters"
        if self.code not in (None, 1):
            return f"exit code {self.code}"
        if self.seconds > _MOST_SECONDS:
            return f"{self.seconds:.1f} s"
        if self.mebibytes > _MOST_MIB:
            return f"{self.mebibytes:.0f} MiB"
        if self.code == 1 and not any("error" in line.lower() for line in self.lines):
            return "no reason"
        return ""


async def run(folder: Path, long: bool) -> list[Row]:
    repository = make_repository(folder)
    files = sorted(
        path
        for place in (repository, folder / "engines")
        for path in place.rglob("*")
        if path.is_file()
    )
    rows = []
    for file in files:
        rows.append(await asyncio.to_thread(_damage, repository, file, folder, long))
    return rows


def _damage(repository: Path, file: Path, folder: Path, long: bool) -> Row:
    """Start a server with each damage of one file."""
    content = file.read_bytes()
    problems = []
    served = 0
    slowest = 0.0
    names = DAMAGES if long else _QUICK
    try:
        for name in names:
            file.write_bytes(DAMAGES[name](content))
            found = _start(repository, folder)
            served += found.code is None
            slowest = max(slowest, found.seconds)
            if problem := found.problem():
                problems.append(f"{name}: {problem}")
    finally:
        file.write_bytes(content)
    text = f"{len(names)} ways: {served} served, slowest {slowest:.1f} s"
    if problems:
        text = f"{text}; {', '.join(problems)}"
    return Row(file.relative_to(folder).as_posix(), text, not problems)


def _start(repository: Path, folder: Path) -> _Run:
    """Start a server and end it once it serves."""
    log = folder / "log"
    script = str(Path(tiny_server.__file__))
    command = [sys.executable, script, "start", "--model-repository", str(repository), *_PORTS]
    environment = os.environ | {"PYTHONPATH": str(tiny_server.ROOT), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    served = False
    seconds = 0.0
    mebibytes = 0.0
    while process.poll() is None:
        mebibytes = max(mebibytes, _most_memory(process.pid))
        if not served and "API docs" in log.read_text(errors="replace"):
            served = True
            seconds = time.monotonic() - begun
            process.send_signal(signal.SIGTERM)
        if time.monotonic() - begun > 6 * _MOST_SECONDS:
            process.kill()
        time.sleep(0.02)
    seconds = seconds or time.monotonic() - begun
    lines = log.read_text(errors="replace").splitlines()
    return _Run(None if served else process.returncode, lines, seconds, mebibytes)


def _most_memory(process: int) -> float:
    """Return the peak of a process in MiB. `ru_maxrss` would count the parent's, too."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0  # it has ended
