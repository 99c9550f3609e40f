"""One secondary front end, seen from the primary one: its process and its messages."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec

from slipstream.server.engine_link.child import child_environment
from slipstream.server.engine_link.link import describe_exit
from slipstream.server.frontends import messages
from slipstream.server.frontends.frames import FrameStream
from slipstream.server.frontends.upstream import ConnectionReceiver
from slipstream.server.log.capture import Relay
from slipstream.server.log.output import HANDLER

logger = logging.getLogger(__name__)

# -P: a file in the working directory must not take the place of a library.
COMMAND = (sys.executable, "-P", "-m", "slipstream.server.frontends.process")
FOLLOW_SECONDS = 60.0  # longest time to load tokenizers and connect to engines
COLLECT_SECONDS = 5.0
SILENCE_SECONDS = 20.0  # longest time without a message of a process that has sent one
_OUTPUT_SECONDS = 0.5
_EXIT_SECONDS = 2.0


class Owner(Protocol):
    """The primary front end, as far as a member calls it."""

    def on_counted(self, index: int, message: messages.Counted) -> None: ...
    def on_connection(self, kind: bytes, connection: socket.socket) -> None: ...
    def on_exit(self, index: int, how: str) -> None: ...


class Member:
    """The process of one secondary front end. A new one takes its place when it has ended."""

    def __init__(
        self,
        index: int,
        frontends: int,
        options: messages.FrontendOptions,
        counts: int,
        http: socket.socket | None,
        owner: Owner,
    ) -> None:
        self.index = index
        self._frontends = frontends
        self._options = options
        self._counts = counts
        self._http = http
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: Relay | None = None
        self._control_socket: socket.socket | None = None
        self._carrier: socket.socket | None = None
        self._control: FrameStream | None = None
        self._receiver: ConnectionReceiver | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sent: messages.Follow | None = None  # the last state that was sent
        self._followed = 0  # number of the last state that it follows
        self._collected = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._silent_seconds: float | None = None  # None: it has sent no message yet
        self.reason = ""  # the reason that it sent before its end, if it sent one
        self.leaving = False  # it is about to exit

    # -- the process

    def spawn(self) -> None:
        """Start the process. Call this from the main thread: the kernel kills the process when the
        calling thread ends.
        """
        self._control_socket, control = socket.socketpair()
        self._carrier, carrier = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        http = -1 if self._http is None else self._http.fileno()
        order = messages.StartOrder(
            self.index,
            self._frontends,
            os.getpid(),
            control.fileno(),
            carrier.fileno(),
            self._counts,
            http,
        )
        log = HANDLER.settings
        terminal = sys.stderr.isatty() and log.format != "json" and not log.file
        inherited = [control.fileno(), carrier.fileno(), self._counts]
        try:
            self._process = subprocess.Popen(
                [*COMMAND, msgspec.json.encode(order).decode()],
                stdin=subprocess.DEVNULL,
                stdout=None if terminal else subprocess.PIPE,
                stderr=None if terminal else subprocess.STDOUT,
                env=child_environment(),
                pass_fds=inherited if http < 0 else [*inherited, http],
                start_new_session=True,  # Ctrl-C in the terminal must reach only the primary one
            )
        finally:
            control.close()
            carrier.close()
        self._relay = None
        if self._process.stdout is not None:
            with self._process.stdout as output:
                self._relay = Relay(os.dup(output.fileno()), self._process.pid, logging.WARNING)
        self._sent = None
        self._followed = 0
        self._silent_seconds = None
        self.reason = ""

    async def attach(self) -> None:
        """Begin to exchange messages with the process, on the running event loop."""
        assert self._process is not None
        assert self._control_socket is not None
        assert self._carrier is not None
        streams = await asyncio.open_unix_connection(sock=self._control_socket)
        self._control = FrameStream(*streams)
        self._receiver = ConnectionReceiver(self._carrier, self._owner.on_connection)
        self._send(messages.Configure(self._options))
        self._reading = asyncio.ensure_future(self._read(self._control))
        event_loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._wait_for_exit, args=(self._process, event_loop), daemon=True
        ).start()

    @property
    def running(self) -> bool:
        return self._control is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def reap(self) -> None:
        """Wait for the process after `kill`, without an event loop."""
        if self._process is not None:
            self._process.wait(5.0)
            self._finish_output()

    def _wait_for_exit(
        self, process: subprocess.Popen[bytes], event_loop: asyncio.AbstractEventLoop
    ) -> None:
        code = process.wait()
        self._finish_output()
        try:
            event_loop.call_soon_threadsafe(self._on_exit, code)
        except RuntimeError:
            return  # the event loop is closed, so there is no one to report to

    def _finish_output(self) -> None:
        if self._relay is not None:
            self._relay.finish(_OUTPUT_SECONDS)

    def _on_exit(self, code: int) -> None:
        self._disconnect()
        self._owner.on_exit(self.index, self.reason or describe_exit(code))

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._control is not None:
            self._control.close()
        if self._reading is not None:
            self._reading.cancel()
        self._control = None
        self._wake()

    def stop_listening(self) -> None:
        """Close this process's end of the HTTP port, where connections would wait."""
        if self._http is not None:
            self._http.close()

    # -- messages

    async def follow(self, state: messages.Follow) -> None:
        """Return when the process follows this state. Kill it if it does not in time."""
        if not self.running:
            return
        if self._sent is None or replace(self._sent, number=state.number) != state:
            self._sent = state
            self._send(state)
        number = self._sent.number
        if not await self._wait(lambda: self._followed >= number, FOLLOW_SECONDS):
            logger.error("front end %d does not respond and is killed", self.index)
            self.kill()

    async def collect(self, number: int) -> None:
        """Return when all that the process has counted is added.

        A process that has been silent for longer than the wait is not waited for again.
        """
        if self.running and (self._silent_seconds or 0.0) < COLLECT_SECONDS:
            self._send(messages.Collect(number))
            if not await self._wait(lambda: self._collected >= number, COLLECT_SECONDS):
                logger.warning("front end %d did not send its statistics in time", self.index)

    def pass_time(self, seconds: float) -> None:
        """Kill the process if it has sent no message for too long: it is stopped, or hangs.

        The caller counts the seconds, so a server that was itself stopped does not blame others.
        """
        if self.running and self._silent_seconds is not None:
            self._silent_seconds += seconds
            if self._silent_seconds >= SILENCE_SECONDS:
                self.reason = f"it sent no message for {SILENCE_SECONDS:g} s and was killed"
                self._silent_seconds = None
                self.kill()

    def stop_requests(self, model: str, request_id: str) -> None:
        self._send(messages.StopRequests(model, request_id))

    async def close(self, seconds: float) -> None:
        """Give the process this long to finish its responses, and end it."""
        self.leaving = True
        self.stop_listening()
        if self._process is None:
            return
        self._send(messages.Close(seconds))
        await self._wait(lambda: False, seconds + _EXIT_SECONDS)
        self.kill()
        await self._wait(lambda: False, _EXIT_SECONDS)

    def _send(self, message: messages.ToSecondary) -> None:
        if self._control is not None:
            self._control.write(*messages.encode(message))

    async def _read(self, control: FrameStream) -> None:
        while (frame := await control.read()) is not None:
            try:
                self._receive(messages.decode(frame.kind, frame.content, messages.FROM_SECONDARY))
            except messages.ControlError:
                logger.exception("front end %d is killed:", self.index)
                self.kill()
                return

    def _receive(self, message: messages.FromSecondary) -> None:
        self._silent_seconds = 0.0
        if isinstance(message, messages.Counted):
            self._owner.on_counted(self.index, message)
        elif isinstance(message, messages.Followed):
            self._followed = message.number
            self._wake()
        elif isinstance(message, messages.Collected):
            self._collected = message.number
            self._wake()
        elif isinstance(message, messages.Failed):
            self.reason = message.reason

    async def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Return whether `done` holds, or the process has ended, within this time."""
        try:
            async with asyncio.timeout(seconds):
                while self.running and not done():
                    waiting = asyncio.get_running_loop().create_future()
                    self._waiting.add(waiting)
                    await waiting
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()
