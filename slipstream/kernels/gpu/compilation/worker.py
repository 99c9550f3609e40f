"""Compiles kernels in processes of their own: `python -m slipstream.kernels.gpu...worker N`.

Standard input has a job per line (`CompileJob`), standard output gets a line for each that ended:
the number of the job, its seconds, and an error or "". At most N jobs run at the same time, each in
a process that is forked after the compiler is loaded. The program ends with its input.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from typing import IO, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.gpu.compilation.jobs import CompileJob, compile_job, fix_cache_keys


@triton.jit
def _nothing():
    pass


def prepare() -> None:
    """Load all kernels, and what the compiler loads and computes when it is first used."""
    fix_cache_keys()
    triton.compile(ASTSource(_nothing, {}, {}, {}), target=GPUTarget("cuda", 90, 32))


class _Running(NamedTuple):
    number: int  # of the job
    process: int
    began: float


class Server:
    """Runs the jobs of a stream."""

    def __init__(self, jobs: int, read: IO[bytes], written: IO[str]) -> None:
        """jobs: the most that run at the same time"""
        self._most = jobs
        self._read = read
        self._written = written
        self._selector = selectors.DefaultSelector()
        self._waiting: list[tuple[int, str]] = []  # number and text of a job
        self._running: dict[int, _Running] = {}  # by the pipe that the process holds
        self._received = 0
        self._rest = b""  # the begin of a line

    def run(self) -> None:
        """Run until the input ends, even if jobs have not ended: no one waits for them."""
        self._selector.register(self._read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._read:
                    self._end(key.fd)
                elif not self._receive():
                    return
            while self._waiting and len(self._running) < self._most:
                self._start(*self._waiting.pop(0))

    def _receive(self) -> bool:
        """Read waiting jobs. False at the end of the input."""
        data = os.read(self._read.fileno(), 2**16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._waiting.append((self._received, line.decode()))
            self._received += 1
        return bool(data)

    def _start(self, number: int, text: str) -> None:
        pipe, child_pipe = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(pipe)
            _run_and_leave(text, child_pipe)
        os.close(child_pipe)
        self._running[pipe] = _Running(number, process, time.monotonic())
        self._selector.register(pipe, selectors.EVENT_READ)

    def _end(self, pipe: int) -> None:
        """Report a job whose process has closed its pipe."""
        error = os.read(pipe, 2**16).decode(errors="replace")
        self._selector.unregister(pipe)
        os.close(pipe)
        job = self._running.pop(pipe)
        _, status = os.waitpid(job.process, 0)
        code = os.waitstatus_to_exitcode(status)
        if code and not error:
            error = f"the process ended with {code}"
        seconds = time.monotonic() - job.began
        print(json.dumps([job.number, seconds, error]), file=self._written, flush=True)


def _run_and_leave(text: str, pipe: int) -> None:
    """Compile a job in a forked process, and write an error to the pipe."""
    code = 0
    try:
        compile_job(CompileJob.from_json(text))
    except Exception as error:
        os.write(pipe, f"{type(error).__name__}: {error}"[:4000].encode())
        code = 1
    os._exit(code)


def main() -> None:
    prepare()
    print(json.dumps("ready"), flush=True)
    Server(int(sys.argv[1]), sys.stdin.buffer, sys.stdout).run()


if __name__ == "__main__":
    main()
