"""Files of a repository that are damaged: the server names the problem in a line, or serves."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tiny_server
from certificates import make_certificate
from real_server import limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import MODEL, make_repository

from gates.poisoned_adapters import damage_adapters
from gates.table import Row
from slipstream.repository.templates import write_repository

_MORE_SECONDS = 2.0  # than a start without damage, at most
_LONGEST_SECONDS = 180.0
_TRIES = 3
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
_QUICK = ("bytes changed", "nested 100,000 deep", "all members null")


@dataclass
class _Run:
    code: int | None  # None: it served
    lines: list[str]
    seconds: float
    mebibytes: float

    def problem(self, file: Path, most_seconds: float) -> str:
        """Return what does not hold, or nothing."""
        if any("Traceback" in line for line in self.lines):
            return "a traceback"
        longest = max((len(line) for line in self.lines), default=0)
        if longest > _LONGEST_LINE:
            return f"a line of {longest} characters"
        if self.code not in (None, 1):
            return f"exit code {self.code}"
        if self.seconds > most_seconds:
            return f"{self.seconds:.1f} s"
        if self.mebibytes > _MOST_MIB:
            return f"{self.mebibytes:.0f} MiB"
        errors = [line for line in self.lines if line.startswith("error: ")]
        if self.code == 1 and errors != self.lines[-1:]:
            return f"{len(errors)} lines with the error, the last line is {self.lines[-1:]}"
        if self.code == 1 and not any(file.name in line for line in self.lines):
            return "no line names the file"
        return ""


@dataclass(frozen=True)
class _Place:
    """A server whose files are damaged."""

    folder: Path
    command: tuple[str, ...]
    files: list[Path]

    def start(self) -> _Run:
        return _start(self.command, self.folder)


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    await asyncio.to_thread(_run, folder, long, rows)


def _run(folder: Path, long: bool, rows: list[Row]) -> None:
    for place in (_scripted(folder / "scripted"), _real(folder / "real")):
        clean = [place.start() for _ in range(2 if long else 1)]
        assert all(one.code is None for one in clean), clean[0].lines[-3:]
        usual = max(one.seconds for one in clean)
        memory = max(one.mebibytes for one in clean)
        text = f"served in {usual:.1f} s with {memory:.0f} MiB"
        rows.append(Row(f"{place.folder.name} engine, not damaged", text, True))
        for number, file in enumerate(place.files):
            names = [*DAMAGES] if long else [_QUICK[number % len(_QUICK)]]
            rows.append(_damage(place, file, names, usual))
    ways = DAMAGES if long else {name: DAMAGES[name] for name in _QUICK}
    rows += damage_adapters(folder / "adapters", ways)


def _scripted(folder: Path) -> _Place:
    """A repository, its engine, a key of clients and a certificate."""
    repository = make_repository(folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    (folder / "api-key").write_text("a-key-of-clients\n")
    options = ["--api-key", str(folder / "api-key")]
    files.append(folder / "api-key")
    if shutil.which("openssl") is not None:
        certificate, key = make_certificate(folder, "own")
        options += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        files += [certificate, key]
    script = str(Path(tiny_server.__file__))
    command = (sys.executable, script, "start", "--model-repository", str(repository), *options)
    return _Place(folder, command, sorted(files))


def _real(folder: Path) -> _Place:
    """The files of a real engine."""
    engine = build_tiny_engine(folder)
    repository = folder / "repository"
    write_repository(repository, MODEL, engine, engine, 64)
    limit_cache(repository, 4096)
    program = ("-m", "slipstream.cli.main", "start", "--repo", str(repository))
    files = sorted(file for file in engine.iterdir() if file.is_file())
    return _Place(folder, (sys.executable, *program), files)


def _damage(place: _Place, file: Path, names: list[str], usual: float) -> Row:
    """Start a server with each damage of one file."""
    content = file.read_bytes()
    problems = []
    served = 0
    slowest = 0.0
    try:
        for name in names:
            file.write_bytes(DAMAGES[name](content))
            for _ in range(_TRIES):  # other work makes a start slow now and then
                found = place.start()
                problem = found.problem(file, usual + _MORE_SECONDS)
                if found.seconds <= usual + _MORE_SECONDS:
                    break
            served += found.code is None
            slowest = max(slowest, found.seconds)
            if problem:
                problems.append(f"{name}: {problem}")
    finally:
        file.write_bytes(content)
    text = f"{len(names)} ways: {served} served, slowest {slowest - usual:+.1f} s"
    if problems:
        text = f"{text}; {', '.join(problems)}"
    return Row(file.relative_to(place.folder.parent).as_posix(), text, not problems)


def _start(command: tuple[str, ...], folder: Path) -> _Run:
    """Start a server and end it once it serves.

    Its seconds are without those in which it or its engine waited for a core, whichever waited for
    longer: that is the work of others.
    """
    log = folder / "log"
    environment = os.environ | {
        "PYTHONPATH": str(tiny_server.ROOT),
        "PYTHONUNBUFFERED": "1",
        "SLIPSTREAM_HOME": str(folder / "home"),
    }
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *_PORTS], stdout=output, stderr=output, env=environment
        )
    served = False
    seconds = 0.0
    mebibytes = 0.0
    waited: dict[int, float] = {}  # by process
    while process.poll() is None:
        mebibytes = max(mebibytes, _most_memory(process.pid))
        for one in (process.pid, *tiny_server.children_of(process.pid)):
            waited[one] = max(waited.get(one, 0.0), _waited(one))
        if not served and "API docs" in log.read_text(errors="replace"):
            served = True
            seconds = time.monotonic() - begun - max(waited.values(), default=0.0)
            process.send_signal(signal.SIGTERM)
        if time.monotonic() - begun > _LONGEST_SECONDS:
            process.kill()
        time.sleep(0.02)
    seconds = seconds or time.monotonic() - begun - max(waited.values(), default=0.0)
    lines = log.read_text(errors="replace").splitlines()
    return _Run(None if served else process.returncode, lines, seconds, mebibytes)


def _waited(process: int) -> float:
    """Return the seconds in which the first thread of a process has waited for a core."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return 0.0  # it has ended


def _most_memory(process: int) -> float:
    """Return the peak of a process in MiB. `ru_maxrss` would count the parent's, too."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0  # it has ended
