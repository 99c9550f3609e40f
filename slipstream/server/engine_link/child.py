"""One engine process, seen from the server: its link, its output and its exit."""

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
from slipstream.engine.messages import DropFrontEnd
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    FromEngine,
    ServerEnd,
    StartOrder,
    new_socket_path,
    remove_socket,
)
from slipstream.server.log.capture import Relay
from slipstream.server.log.output import HANDLER

logger = logging.getLogger(__name__)

# -P: a file in the working directory must not take the place of a library.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "slipstream.engine_worker.process")
API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
ADMIN_KEY_VARIABLE = "SLIPSTREAM_ADMIN_KEY"
_REASON_SECONDS = 1.0  # longest wait for the reason that the process sent before its exit
# longest wait for the rest of its output, in case another process holds the pipe open
_OUTPUT_SECONDS = 0.5


class EngineChild:
    def __init__(
        self,
        command: Sequence[str],
        engine_folder: str,
        settings: EngineSettings,
        name: str = "",
        frontends: int = 1,
    ) -> None:
        """`name`: name of the engine model in the log. `frontends`: processes of the server."""
        # On a terminal the process shows a progress bar itself. Elsewhere its output is captured
        # and logged.
        log = HANDLER.settings
        terminal = sys.stderr.isatty() and log.format != "json" and not log.file
        self.link = ServerEnd()
        # one socket per front end; this one, the primary, has the first
        self._paths = [self.link.path, *(new_socket_path() for _ in range(frontends - 1))]
        sockets = [str(path) for path in self._paths]
        order = StartOrder(sockets, engine_folder, settings.to_json(), os.getpid())
        try:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(order).decode()],
                stdin=subprocess.DEVNULL,
                stdout=None if terminal else subprocess.PIPE,
                stderr=None if terminal else subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C in the terminal must reach only the server
            )
        except OSError:
            self._close_links()
            raise
        self._relay: Relay | None = None
        if self._process.stdout is not None:
            with self._process.stdout as output:
                self._relay = Relay(
                    os.dup(output.fileno()), self._process.pid, logging.WARNING, name
                )
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def link_path(self, index: int) -> str:
        """Return the path of the socket that this front end binds."""
        return str(self._paths[index])

    def drop_frontend(self, index: int) -> None:
        """Cancel the requests of a front end that has ended. Its successor gets a new socket."""
        remove_socket(self._paths[index])
        self._paths[index] = new_socket_path()
        self.link.send(DropFrontEnd(index, str(self._paths[index])))

    def attach(
        self,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[str], None],
        has_reason: Callable[[], bool],
    ) -> None:
        """Call these on the running event loop for each message, and once for the exit.

        `has_reason` says whether the process has sent the reason of its exit.
        """
        self._event_loop = asyncio.get_running_loop()
        self.link.attach(on_message)
        threading.Thread(
            target=self._wait_for_exit, args=(on_exit, has_reason), daemon=True
        ).start()

    async def wait(self, seconds: float) -> bool:
        """Return whether the process ends within this time."""
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
        """Close the links and reap the process."""
        self._close_links()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            logger.error("engine process %d was killed but has not ended", self._process.pid)
        self._finish_output()

    def _close_links(self) -> None:
        self.link.close()
        for path in self._paths:
            remove_socket(path)

    def _finish_output(self) -> None:
        if self._relay is not None:
            self._relay.finish(_OUTPUT_SECONDS)

    def _wait_for_exit(
        self, on_exit: Callable[[str], None], has_reason: Callable[[], bool]
    ) -> None:
        code = self._process.wait()
        self._finish_output()  # the last lines of the process come before what the exit causes
        assert self._event_loop is not None

        def report(patience: float) -> None:
            """Report the exit once all that was sent before it is read: outputs and the reason."""
            self.link.receive_waiting()
            if code == EXIT_WITH_REASON and not has_reason() and patience > 0:
                assert self._event_loop is not None
                self._event_loop.call_later(0.02, report, patience - 0.02)
                return
            on_exit(describe_exit(code))

        try:
            self._event_loop.call_soon_threadsafe(report, _REASON_SECONDS)
        except RuntimeError:
            return  # the event loop is closed, so there is no one to report to


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process that is started with -P.

    PYTHONPATH leads it to a checkout; an installed package is found without.
    """
    # Weights in huge pages: each decode step streams through all of them, and small pages make it
    # a fifth slower.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | dict(os.environ)
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        # keys of the server, which the code of a model must not see
        environment.pop(variable, None)
    root = Path(slipstream.__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return environment
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path}
