"""Run one contender in a process: send requests, read answers, measure start time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ANSWER_SECONDS = 900.0  # a peer may compile for minutes before its first answer


class ContenderFailed(Exception):
    """A contender failed. The text is one line with its name and the last line of its log."""


@dataclass(frozen=True)
class Contender:
    """The command that starts a contender. Contenders of the same `group` have the same weights."""

    name: str
    group: str
    python: str
    script: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.name


class Running:
    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender = contender
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [contender.python, str(FOLDER / contender.script), json.dumps(contender.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **contender.environment},
                start_new_session=True,
                text=True,
            )

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it has ended") from None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise self._failure(f"no answer within {ANSWER_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(f"it ended with code {self._process.wait()}")
        return json.loads(line)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, sampled: bool = False
    ) -> dict[str, Any]:
        order = {"prompts": prompts, "max_tokens": max_tokens, "sampled": sampled}
        answer = self.ask(order)
        if [len(tokens) for tokens in answer["tokens"]] != [max_tokens] * len(prompts):
            raise self._failure("it did not return all tokens of every request")
        return answer

    def peak_bytes(self) -> int:
        """Return the peak resident memory of the process and its children.

        Shared pages count once per process.
        """
        return sum(_peak_bytes(process) for process in process_tree(self._process.pid))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            print(f"{self.contender.name} does not exit and is killed", file=sys.stderr)
        # The process may have left children behind. ProcessLookupError means that it has not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _failure(self, what: str) -> ContenderFailed:
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ] or ["(nothing)"]
        return ContenderFailed(
            f"{self.contender.name}, {self.contender.group}: {what}; {self._log} ends: {lines[-1]}"
        )


def start(contender: Contender, log: Path, prompt: list[int]) -> tuple[Running, float]:
    """Start a contender. Return it and the seconds from process start to its first token."""
    began = time.perf_counter()
    running = Running(contender, log)
    try:
        running.generate([prompt], 1)
    except BaseException:
        running.close()
        raise
    return running, time.perf_counter() - began


def process_tree(process: int) -> list[int]:
    """Return a process and its children, theirs and so on."""
    children = Path(f"/proc/{process}/task/{process}/children")
    found = [process]
    # Threads other than the first may have started processes too.
    for path in children.parent.parent.glob("*/children"):
        for child in path.read_text().split():
            found += process_tree(int(child))
    return found


def _peak_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
