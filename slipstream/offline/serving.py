"""A server that uses the engine of `slipstream.LLM`, in a process of its own.

The server process is the one of `slipstream start`, so it does not import torch, and a handler of
a request never waits for a step. It is linked to the engine of this process as it is to an engine
process (`server/engine_link/shared_engine.py`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slipstream.repository.templates import FIXED_NAMES, write_repository
from slipstream.server.engine_link.child import API_KEY_VARIABLE, child_environment
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.engine_link.link import describe_exit
from slipstream.server.engine_link.shared_engine import SharedEngine
from slipstream.weights.engine_config import read_engine_config

_PROGRAM = "slipstream.cli.llm_server"
_STARTED = re.compile(r"Started (GRPCInferenceService|HTTPService|Metrics Service) at (\S+:\d+)")
_SERVICES = 3  # that a server starts
_KEPT_LINES = 20  # of the log, for the reason of a failed start
_KILL_SECONDS = 10.0  # added to the exit timeout before the process is killed
_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class ServerFailed(RuntimeError):
    """The server did not start, or has ended. The message has the end of its log."""


class LLMServer:
    """A running server. `with` stops it at the end."""

    def __init__(
        self,
        engine: InProcessEngine,
        engine_folder: Path,
        model_name: str,
        options: Sequence[str],
        api_key: str | None,
        exit_timeout: float,
        log: bool,
    ) -> None:
        """options: of `slipstream start`. log: whether the server's log is shown"""
        self.model_name = model_name
        self._exit_timeout = exit_timeout
        self._log = log
        self._places: dict[str, str] = {}  # address of each service
        self._started = threading.Event()  # it serves, or has ended
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        limits = read_engine_config(engine_folder).build
        self._shared_engine = SharedEngine(engine)
        # a later server removes this folder if this process is killed
        repository = self._shared_engine.path.parent / "models"
        try:
            write_repository(
                repository, model_name, engine_folder, engine_folder, limits.max_batch_size
            )
        except BaseException:
            self._shared_engine.close()
            raise
        own = ["--repo", str(repository), "--ranks=1", f"--exit-timeout-secs={exit_timeout:g}"]
        command = [
            sys.executable,
            "-P",
            "-m",
            _PROGRAM,
            str(os.getpid()),
            str(self._shared_engine.path),
        ]
        self._process = subprocess.Popen(
            [*command, *own, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(api_key),
            start_new_session=True,  # Ctrl-C in the terminal reaches this process, which stops it
        )
        self._reader = threading.Thread(target=self._read_log, name="server-log", daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """The address of HTTP: Triton's routes, and OpenAI's under /v1."""
        return f"http://{self._places['HTTPService']}"

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of gRPC."""
        return self._places["GRPCInferenceService"]

    @property
    def metrics_url(self) -> str:
        """The address of the metrics, which Prometheus reads at /metrics."""
        return f"http://{self._places['Metrics Service']}"

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def __repr__(self) -> str:
        state = self.url if self.running and self._places else "stopped"
        return f"<LLMServer of {self.model_name!r}: {state}>"

    def wait_started(self) -> None:
        """Return when it serves. Raise ServerFailed if it does not."""
        self._started.wait()
        if len(self._places) < _SERVICES:
            self._end()
            how = describe_exit(self._process.wait())
            lines = "".join(self._last_lines)
            raise ServerFailed(f"the server did not start ({how}); its log:\n{lines}")

    def wait(self) -> None:
        """Serve until Ctrl-C or SIGTERM, then stop. Raise ServerFailed if the server fails."""
        with _sigterm_as_interrupt():
            try:
                code = self._process.wait()
            except KeyboardInterrupt:
                self.stop()
                return
        self._end()
        if code:
            lines = "".join(self._last_lines)
            raise ServerFailed(f"the server ended ({describe_exit(code)}); its log:\n{lines}")

    def stop(self) -> None:
        """Wait until running requests finish, for the exit timeout at most, and end the server."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._exit_timeout + _KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._end()

    def __enter__(self) -> LLMServer:
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def _end(self) -> None:
        """Remove what only a running server needs."""
        self._reader.join()
        self._shared_engine.close()

    def _read_log(self) -> None:
        """Find the addresses in the log, and show it if it is wanted."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if self._log:
                    sys.stderr.write(line)
                self._last_lines.append(line)
                if found := _STARTED.search(line):
                    self._places[found[1]] = found[2]
                    if len(self._places) == _SERVICES:
                        self._started.set()
        self._started.set()


def start_options(
    host: str, port: int, grpc_port: int, metrics_port: int, options: Sequence[str]
) -> list[str]:
    """Return the options of `slipstream start`. Raises ValueError for those of other arguments."""
    taken = ("--repo", "--model-repository", "--log-format", "--mode")
    for option in options:
        if not option.startswith("--"):
            raise ValueError(
                f"options: {option!r} is no option of slipstream start; write --NAME or "
                "--NAME=VALUE"
            )
        if option.partition("=")[0] in taken:
            raise ValueError(f"options: {option} cannot be given here: the engine is this one")
    ports = [f"--http-port={port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    return [f"--address={host}", *ports, *options]


def served_name(model: str) -> str:
    """Return the name under which a model is served: the last part of its path or hub id."""
    path = Path(model)
    last = path.stem if path.suffix == ".gguf" else path.name
    name = _UNFIT_FOR_A_NAME.sub("-", last).lstrip(".-") or "model"
    return f"{name}-model" if name in FIXED_NAMES else name


def _environment(api_key: str | None) -> dict[str, str]:
    """Return the environment of the server. The key is not in it unless it is given."""
    keys = {} if api_key is None else {API_KEY_VARIABLE: api_key}
    return child_environment() | keys | {"PYTHONUNBUFFERED": "1"}


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, in the main thread and if the program has no handler of its own."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former: Callable[[int, FrameType | None], object] | int | None
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
