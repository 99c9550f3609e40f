"""One engine process as the server holds it: its link, its exit, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import slipstream
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    EngineFailed,
    FromEngine,
    ServerEnd,
    StartOrder,
)
from slipstream.server.kserve.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from slipstream.server.log.capture import Relay
from slipstream.server.log.output import HANDLER

logger = logging.getLogger(__name__)

# -P: a file in the working directory must not stand in for a library.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "slipstream.engine_worker.process")
_REASON_SECONDS = 1.0  # how long an exit waits for the reason that was sent before it
# how long it waits for what was printed, should another process hold the pipe open
_OUTPUT_SECONDS = 0.5


class EngineChild:
    def __init__(
        self, command: Sequence[str], engine_folder: str, settings: EngineSettings, name: str = ""
    ) -> None:
        """`name`: of the engine model, for the log."""
        # A terminal gets a bar that grows, from the process itself; elsewhere what it prints is for
        # us to write.
        log = HANDLER.settings
        terminal = sys.stderr.isatty() and log.format != "json" and not log.file
        self.link = ServerEnd()
        order = StartOrder(str(self.link.path), engine_folder, settings.to_json(), os.getpid())
        try:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(order).decode()],
                stdin=subprocess.DEVNULL,
                stdout=None if terminal else subprocess.PIPE,
                stderr=None if terminal else subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is for the server alone
            )
        except OSError:
            self.link.close()
            raise
        self._relay: Relay | None = None
        if self._process.stdout is not None:
            with self._process.stdout as output:
                self._relay = Relay(
                    os.dup(output.fileno()), self._process.pid, logging.WARNING, name
                )
        self._reason_known = False
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def attach(
        self, on_message: Callable[[FromEngine], None], on_exit: Callable[[str], None]
    ) -> None:
        """From now on tell the running event loop what the process says, and how it ended."""
        self._event_loop = asyncio.get_running_loop()

        def receive(message: FromEngine) -> None:
            self._reason_known |= isinstance(message, EngineFailed)
            on_message(message)

        self.link.attach(receive)
        threading.Thread(target=self._wait_for_exit, args=(on_exit,), daemon=True).start()

    async def wait(self, seconds: float) -> bool:
        """True when the process has ended within this time."""
        for _ in range(max(1, round(seconds / 0.01))):
            if self._process.poll() is not None:
                return True
            await asyncio.sleep(0.01)
        return False

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing once the process has been waited for

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Give back the link's socket and the entry in the kernel's process table."""
        self.link.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            logger.error("engine process %d was killed but has not ended", self._process.pid)
        self._finish_output()

    def _finish_output(self) -> None:
        if self._relay is not None:
            self._relay.finish(_OUTPUT_SECONDS)

    def _wait_for_exit(self, on_exit: Callable[[str], None]) -> None:
        code = self._process.wait()
        self._finish_output()  # so that its last words stand before what they lead to
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._tell_exit, code, on_exit, _REASON_SECONDS)
        except RuntimeError:
            return  # the event loop is closed: nobody is left to tell

    def _tell_exit(self, code: int, on_exit: Callable[[str], None], patience: float) -> None:
        """What was sent before the end is read first: tokens that were computed, and the reason."""
        self.link.receive_waiting()
        if code == EXIT_WITH_REASON and not self._reason_known and patience > 0:
            assert self._event_loop is not None
            self._event_loop.call_later(0.02, self._tell_exit, code, on_exit, patience - 0.02)
            return
        on_exit(describe_exit(code))


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def child_environment() -> dict[str, str]:
    """For Python started with -P: a checkout is found through PYTHONPATH, an installed package by
    itself.
    """
    # Weights in huge pages: decoding streams through all of them each step, and small pages cost it
    # a fifth.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | dict(os.environ)
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        # the server's own; a model's code has no business with them
        environment.pop(variable, None)
    root = Path(slipstream.__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return environment
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path}
