"""Runs a tutorial's command lines as pasted. Only paths and ports differ, and the model is tiny."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "seeds"
ROOT = HERE.parents[1]
_PROGRAMS = {
    "python3": "",
    "python": "",
    "slipstream": "-m slipstream.cli.main",
    "triton": "-c \"import sys; sys.argv[0] = 'triton'; from slipstream.cli.main import main; main()\"",
    "genai-perf": '-c "from slipstream.cli.compat.scripts import genai_perf; genai_perf()"',
    "perf_analyzer": '-c "from slipstream.cli.compat.scripts import perf_analyzer; perf_analyzer()"',
    "trtllm-build": '-c "from slipstream.cli.compat.scripts import trtllm_build; trtllm_build()"',
    "tritonserver": "-m slipstream.cli.compat.tritonserver",
}


def blocks_of(file: Path) -> list[tuple[str, str]]:
    """Return the name and the commands of each block. `skipped: …` says why one is not run."""
    blocks = file.read_text().split("#### ")[1:]
    return [(block.partition("\n")[0], block.partition("\n")[2]) for block in blocks]


class Tutorial:
    """A tutorial's working folder, its programs, and free ports in place of the default ones."""

    def __init__(self, name: str, folder: Path, places: Mapping[str, str], like: str) -> None:
        self.folder = folder
        self.places = places
        self.printed = ""  # output of the commands before the server
        self.blocks = dict(blocks_of(HERE / f"{name}.txt"))
        self.server: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"
        self._write_programs()
        self.run(f"slipstream workspace tensorrtllm_backend --like {like}")

    @functools.cached_property
    def ports(self) -> dict[int, int]:
        """Free ports. They are chosen late, so that no other process takes them before."""
        return {port: _free_port() for port in (8000, 8001, 8002)}

    def _write_programs(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name, arguments in _PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (programs / name).chmod(0o755)

    def text(self, block: str) -> str:
        places = re.compile("|".join(re.escape(old) for old in self.places))
        text = places.sub(lambda match: self.places[match.group()], self.blocks[block])
        return re.sub(
            r"localhost:(800\d)", lambda match: f"localhost:{self.ports[int(match.group(1))]}", text
        )

    def run(self, script: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=cwd or self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{self.log()[-2000:]}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "SLIPSTREAM"))
        }
        return keep | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder / "home"),
            "HF_HUB_OFFLINE": "1",
        }

    def prepare(self, block: str = "before", cwd: Path | None = None) -> Tutorial:
        self.printed = self.run(self.text(block), cwd)
        return self

    def serve(self, extra: str, cwd: Path | None = None) -> None:
        """Run the server block with these ports, and wait until the server is ready."""
        script = self.text("server").rstrip() + f" {extra}"
        with self._log.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-e", "-c", script],
                cwd=cwd or self.folder,
                env=self._environment(),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while not self._is_ready():
            assert time.monotonic() < deadline, self.log()
            assert self.server.poll() in (None, 0), self.log()
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            url = f"http://localhost:{self.ports[8000]}/v2/health/ready"
            return urllib.request.urlopen(url, timeout=5).status == 200
        except OSError:
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.is_file() else ""

    def ask(self, cwd: Path | None = None) -> str:
        return self.run(self.text("ask"), cwd)

    def _processes(self) -> list[Path]:
        """Return the processes of this tutorial, which are those with its home."""
        mark = f"HOME={self.folder / 'home'}".encode()
        return [place for place in Path("/proc").glob("[0-9]*") if mark in _environment_of(place)]

    def process_names(self) -> set[str]:
        return {(place / "comm").read_text().strip() for place in self._processes()}

    def close(self) -> None:
        for _ in range(300):
            left = self._processes()
            if not left:
                return
            for place in left:
                subprocess.run(["kill", place.name], check=False, capture_output=True)
            if self.server is not None:
                self.server.poll()  # removes the process if it has ended
            time.sleep(0.1)
        raise AssertionError(f"still running: {left}")


def _environment_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


def long_port_flags(tutorial: Tutorial, style: str) -> str:
    """Return the port flags in the launcher's style (`_`) or the server's (`-`)."""
    return " ".join(
        f"--{name}{style}port={tutorial.ports[port]}"
        for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002))
    )


def answer_of(output: str) -> dict[str, Any]:
    """Return the JSON object that `curl` printed last."""
    return json.loads(output[output.index('{"') :])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
