"""The server's side of one process of a Python model: its sockets, its output, its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slipstream.server.engine_link.child import child_environment
from slipstream.server.engine_link.link import describe_exit
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.log.capture import LineSplitter
from slipstream.server.python_models.calls import Calls, PythonModelContext
from slipstream.server.python_models.frames import (
    FROM_WORKER,
    LARGE_BYTES,
    Ack,
    Buffer,
    Call,
    CallAck,
    CallCancel,
    Cancel,
    Control,
    ControlAnswer,
    ErrorFrame,
    Execute,
    Executed,
    FrameError,
    FrameReader,
    FromWorker,
    Log,
    MetricFamilyFrame,
    MetricFrame,
    RequestFrame,
    Response,
    Start,
    Started,
    StartFailed,
    Stop,
    ToWorker,
    encode,
    size_of,
)

logger = logging.getLogger(__name__)

# -P: a file in the working directory must not replace a library.
WORKER_COMMAND = (sys.executable, "-P", "-m", "slipstream.server.python_models.worker")
# levels of the messages that a model logs; V stands for verbose
_LOG_LEVELS = {
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "V": logging.DEBUG,
}
STOP_SECONDS = 10.0  # time limit of `finalize`
_FLUSH_SECONDS = 0.5  # time to read what a process sent before it ended


class _Link(asyncio.BufferedProtocol):
    """The server's end of a socket."""

    def __init__(
        self, on_message: Callable[[FromWorker], None], on_lost: Callable[[], None]
    ) -> None:
        self._reader = FrameReader(FROM_WORKER)
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._held: list[Buffer] | None = None  # frames written while messages are handled
        self._writable = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the messages, then send what they led to together, which saves system calls."""
        self._held = []
        try:
            for message in self._reader.received(nbytes):
                self._on_message(message)
        except FrameError as error:
            logger.error("a Python model's process sent an invalid message: %s", error)
            self.close()
        finally:
            held = self._held
            self._held = None
            if held:
                self._send(held)

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def write(self, message: ToWorker) -> int:
        """Write a message; return the bytes that it takes."""
        frame = encode(message)
        if self._held is not None:
            self._held += frame
        else:
            self._send(frame)
        return size_of(frame)

    def _send(self, pieces: list[Buffer]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if size_of(pieces) < LARGE_BYTES:  # one buffer is sent faster than several
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    async def send(self, message: ToWorker) -> int:
        """Write a message and wait while the model does not read."""
        written = self.write(message)
        await self._writable.wait()
        return written

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Instance:
    """One process. It may hold `depth` batches: the one that it executes and the next ones."""

    def __init__(
        self,
        name: str,
        model: str,
        depth: int,
        context: PythonModelContext,
        on_response: Callable[[Response], None],
        on_free: Callable[[Instance], None],
        on_end: Callable[[Instance, str], None],
    ) -> None:
        self.name = name
        self._model = model
        self._depth = depth
        self._serving = False
        # the batches that it holds, as numbers of requests
        self._batches: deque[list[int]] = deque()
        self._context = context
        self._on_response = on_response
        self._on_free = on_free
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: _Link | None = None
        self._events: _Link | None = None
        self._calls: Calls | None = None
        self._started: asyncio.Future[str] | None = None
        self._ended = asyncio.Event()
        self._output = LineSplitter()

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def has_room(self) -> bool:
        return self._serving and len(self._batches) < self._depth

    @property
    def not_begun(self) -> set[int]:
        """The requests that it holds but has not started: all but the first batch."""
        return set(itertools.chain.from_iterable(itertools.islice(self._batches, 1, None)))

    async def start(self, order: Start) -> str:
        """Start the process; return the configuration that the model completed, "" if it did not.

        Raises InferenceError where the model fails to start.
        """
        event_loop = asyncio.get_running_loop()
        self._started = event_loop.create_future()
        orders, their_orders = socket.socketpair()
        events, their_events = socket.socketpair()
        with their_orders, their_events:
            self._process = _spawn(their_orders, their_events)
        self._follow_output(event_loop)
        self._orders = await _link(orders, self._receive, self._lost)
        self._events = await _link(events, self._receive, self._orders.close)
        self._calls = Calls(self._context, self._events.send)
        self._orders.write(order)
        return await self._started

    def _follow_output(self, event_loop: asyncio.AbstractEventLoop) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, False)
        event_loop.add_reader(descriptor, self._read_output, event_loop, descriptor)
        # watches the process itself: others that the model forked may keep the sockets open
        if hasattr(os, "pidfd_open"):
            watched = os.pidfd_open(self._process.pid)
            event_loop.add_reader(watched, self._exited, event_loop, watched)

    def _exited(self, event_loop: asyncio.AbstractEventLoop, watched: int) -> None:
        event_loop.remove_reader(watched)
        os.close(watched)
        if self._orders is not None:
            event_loop.call_later(_FLUSH_SECONDS, self._orders.close)

    def _read_output(self, event_loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        for line in self._output.push(data):
            logger.info(line, extra={"place": self.name, "model": self._model})
        if not data:
            event_loop.remove_reader(descriptor)
            assert self._process is not None
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _receive(self, message: FromWorker) -> None:
        assert self._calls is not None
        assert self._started is not None
        if isinstance(message, Executed):
            self._batches.popleft()
            for response in message.responses:
                self._on_response(response)
            self._on_free(self)
        elif isinstance(message, Response):
            self._on_response(message)
        elif isinstance(message, Call):
            self._calls.begin(message)
        elif isinstance(message, CallCancel):
            self._calls.cancel(message.call)
        elif isinstance(message, CallAck):
            self._calls.acknowledge(message.call)
        elif isinstance(message, Control):
            self._control(message)
        elif isinstance(message, Started):
            self._serving = True
            self._started.set_result(message.config)
        elif isinstance(message, StartFailed):
            self._started.set_exception(InferenceError(message.reason, Code.INTERNAL))
        else:
            self._note(message)

    def _control(self, message: Control) -> None:
        assert self._calls is not None
        assert self._events is not None
        assert self._started is not None
        if message.action in ("load", "unload") and not self._started.done():
            # the load of this model holds the repository until it has started: it would deadlock
            text = "models cannot be loaded or unloaded while this one is being initialized"
            self._events.write(
                ControlAnswer(message.call, 0.0, ErrorFrame(text, Code.UNAVAILABLE.name))
            )
        else:
            self._calls.begin_control(message)

    def _note(self, message: Log | MetricFamilyFrame | MetricFrame) -> None:
        if isinstance(message, MetricFamilyFrame):
            self._context.metrics.add_family(message)
        elif isinstance(message, MetricFrame):
            self._context.metrics.change(message)
        else:
            context = {
                "place": message.place,
                "model": self._model,
                "request_id": message.request_id,
            }
            logger.log(
                _LOG_LEVELS.get(message.level, logging.DEBUG), message.message, extra=context
            )

    def execute(self, requests: list[RequestFrame]) -> None:
        """Send a batch to the process. Raises FrameError where it cannot be sent."""
        assert self._orders is not None
        self._orders.write(Execute(requests))
        self._batches.append([request.number for request in requests])

    def cancel(self, number: int) -> None:
        if self._events is not None:
            self._events.write(Cancel(number))

    def acknowledge(self, number: int) -> None:
        if self._events is not None:
            self._events.write(Ack(number))

    def _lost(self) -> None:
        """End the process, whose socket is closed."""
        self._serving = False
        self._kill_group()
        if self._events is not None:
            self._events.close()
        if self._calls is not None:
            self._calls.close()
        self.kill()
        event_loop = asyncio.get_running_loop()
        event_loop.run_in_executor(None, self._reap).add_done_callback(
            lambda done: self._end(done.result())
        )

    def _reap(self) -> str:
        assert self._process is not None
        return describe_exit(self._process.wait())

    def _end(self, reason: str) -> None:
        if self._started is not None and not self._started.done():
            text = f"the process of model instance '{self.name}' ended while it started: {reason}"
            self._started.set_exception(InferenceError(text, Code.INTERNAL))
        self._ended.set()
        self._on_end(self, reason)

    def _kill_group(self) -> None:
        """Kill the process group: processes that the model started would outlive the server."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def stop(self) -> None:
        """Call the model's `finalize`; kill the process if that takes too long."""
        if self._orders is None:
            return
        self._orders.write(Stop())
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
        except TimeoutError:
            logger.warning(
                "model instance '%s' does not finish and is killed",
                self.name,
                extra={"model": self._model},
            )
            self.kill()
            await self._ended.wait()


async def _link(
    end: socket.socket, on_message: Callable[[FromWorker], None], on_lost: Callable[[], None]
) -> _Link:
    link = _Link(on_message, on_lost)
    end.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=end)
    return link


def _spawn(*ends: socket.socket) -> subprocess.Popen[bytes]:
    descriptors = [end.fileno() for end in ends]
    return subprocess.Popen(
        [*WORKER_COMMAND, *map(str, descriptors), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        env={**child_environment(), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a Ctrl-C in the terminal is for the server alone
    )
