"""The client of an engine process: it starts the process, sends requests, notices when the process
dies and restarts it.

    engine = EngineClient(folder, settings)
    engine.spawn()                 # the process begins to load; no event loop is needed yet
    await engine.start()           # returns when it serves; EngineStartFailed says why it does not
    async for output in engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling)): ...

When the process dies, its requests fail at once with the reason, and it is restarted a limited
number of times; then `wait_failed` returns and the server exits. A process that has work and sends
no message for too long must write its stacks, is killed, and counts as dead. This module does not
import torch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.messages import (
    Cancel,
    EngineInfo,
    EngineStats,
    Shutdown,
    StatsPeriod,
    StepOutputs,
)
from slipstream.engine.request import GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.child import ENGINE_COMMAND, EngineChild
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.link import EngineFailed, FromEngine
from slipstream.server.engine_link.mailbox import InFlightRequest, Mailboxes
from slipstream.server.engine_link.serve import STATS_SECONDS
from slipstream.server.log.output import HANDLER

logger = logging.getLogger(__name__)


class EngineStartFailed(Exception):
    """The engine failed before it could serve. The text is the cause."""


@dataclass(frozen=True)
class Supervision:
    """When an engine process is restarted, and when it has failed for good."""

    restarts: int = 3  # restarts allowed within the window
    window_seconds: float = 600.0
    silence_seconds: float = 60.0  # longest time without a message while there is work
    start_seconds: float = 300.0  # longest time from the start of the process until it serves


class EngineClient:
    def __init__(
        self,
        engine_folder: str | Path,
        settings: EngineSettings = EngineSettings(),
        supervision: Supervision = Supervision(),
        command: Sequence[str] = ENGINE_COMMAND,
        name: str = "",
    ) -> None:
        """`name`: name of the engine model in the log."""
        self.info: EngineInfo | None = None
        # why it does not serve; None while it serves or loads for the first time
        self.failure: str | None = None
        self.on_stats: Callable[[], None] | None = None
        self._verbose = False  # the process sends its statistics after each step
        self._process_stats = EngineStats()  # latest statistics of the current process
        self._past_stats = EngineStats()  # totals of the processes before it
        self._predecessor: EngineClient | None = None  # the engine that this one replaces
        self._engine_folder = str(engine_folder)
        self._settings = settings
        self._supervision = supervision
        self._command = command
        self._name = name
        self._mailboxes = Mailboxes()
        self._child: EngineChild | None = None
        self._serving = False
        self._lost = False  # the process has failed, but may not have ended yet
        self._draining = False
        self._stopping = False
        self._restarts: deque[float] = deque()
        self._silent_seconds = 0.0
        self._loading_seconds = 0.0
        self._started: asyncio.Future[None] | None = None
        self._failed: asyncio.Future[str] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    # -- requests

    @property
    def ready(self) -> bool:
        """Whether it serves, accepts new work and makes progress with the work it has."""
        stalled = self._silent_seconds > self._supervision.silence_seconds / 4
        return self._serving and not self._draining and not stalled

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics. Totals never fall, though each process counts from zero."""
        predecessor = self._predecessor
        if predecessor is not None and predecessor.info is None:
            # it has ended, so its totals are final
            self._past_stats = self._past_stats.plus_totals_of(predecessor.stats)
            self._predecessor = None
            predecessor = None
        past = self._past_stats
        if predecessor is not None:
            past = past.plus_totals_of(predecessor.stats)
        return self._process_stats.plus_totals_of(past)

    def continue_counters_of(self, predecessor: EngineClient) -> None:
        """Add the totals of the engine that this one replaces, which may still finish its work."""
        self._predecessor = predecessor

    @property
    def outstanding(self) -> int:
        return len(self._mailboxes)

    @property
    def process_id(self) -> int | None:
        """The id of the engine process; None while there is none."""
        return None if self._child is None else self._child.process_id

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        if self._draining or self._stopping:
            raise EngineUnavailable("the server is shutting down")
        if not self._serving or self._child is None:
            raise EngineUnavailable(
                f"the engine is not running: {self.failure or 'it is still loading'}"
            )
        self._follow_log_level()
        in_flight = self._mailboxes.open(request, self._cancel)
        try:
            self._child.link.send(in_flight.request)
        except Exception:
            # an open mailbox would count as work that the engine never ends
            self._mailboxes.withdraw(in_flight)
            raise
        return in_flight

    def _cancel(self, request_id: int, reason: str) -> None:
        if self._child is not None:
            self._child.link.send(Cancel([request_id], reason))

    # -- start and stop

    def spawn(self) -> None:
        """Start the process. Call this from the main thread: the kernel kills the process when the
        calling thread ends.
        """
        self._child = EngineChild(self._command, self._engine_folder, self._settings, self._name)
        self._loading_seconds = 0.0
        self._lost = False
        self._verbose = False

    async def start(self) -> None:
        """Return when the engine serves. EngineStartFailed says why it does not."""
        if self._child is None:
            self.spawn()
        event_loop = asyncio.get_running_loop()
        self._started = event_loop.create_future()
        self._failed = event_loop.create_future()
        self._watchdog = event_loop.create_task(self._watch())
        self._attach()
        await self._started

    async def wait_failed(self) -> str:
        """Wait until the engine has failed for good and return the reason."""
        assert self._failed is not None, "start() comes first"
        return await asyncio.shield(self._failed)

    def begin_drain(self) -> None:
        """Refuse new requests and go on with those in flight."""
        self._draining = True

    async def wait_drained(self) -> None:
        await self._mailboxes.wait_empty()

    async def stop(self, patience_seconds: float = 5.0) -> None:
        """End the process. Requests still in flight fail."""
        self._stopping = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._mailboxes.fail_all("the server is shutting down")
        child = self._child
        if child is None:
            return
        if self._serving and child.link.send(Shutdown()):
            await child.wait(patience_seconds)
        self._serving = False
        child.kill()
        await child.wait(patience_seconds)
        child.close()
        self._child = None

    def kill(self) -> None:
        """End the process now, without an event loop."""
        self._stopping = True
        self._serving = False
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None

    # -- messages and exit of the process

    def _attach(self) -> None:
        assert self._child is not None
        self._child.attach(self._on_message, self._on_exit, lambda: self._lost)

    def _on_message(self, message: FromEngine) -> None:
        self._silent_seconds = 0.0
        if isinstance(message, StepOutputs):
            self._mailboxes.deliver(message)
        elif isinstance(message, EngineStats):
            self._process_stats = message
            self._follow_log_level()
            if self._verbose and self.on_stats is not None:
                self.on_stats()
        elif isinstance(message, EngineInfo):
            self._on_serving(message)
        elif isinstance(message, EngineFailed):
            self._lose(message.reason)

    def _follow_log_level(self) -> None:
        """Ask for statistics after each step while verbose lines are logged."""
        verbose = HANDLER.settings.verbose_level > 0
        if verbose != self._verbose and self._child is not None:
            self._verbose = verbose
            self._child.link.send(StatsPeriod(0.0 if verbose else STATS_SECONDS))

    def _on_serving(self, info: EngineInfo) -> None:
        assert self._child is not None
        assert self._started is not None
        self._child.link.unlink_socket()
        self.info = info
        self.failure = None
        self._serving = True
        if not self._started.done():
            self._started.set_result(None)
        else:
            seconds = time.monotonic() - self._restarts[-1]
            logger.info(
                "the engine serves again, after %.1f s", seconds, extra={"model": self._name}
            )

    def _lose(self, reason: str) -> None:
        """Fail all requests in flight. The first reason that is given is the cause."""
        if not self._lost:
            self.failure = reason
            self._lost = True
        self._serving = False
        self._silent_seconds = 0.0
        self._mailboxes.fail_all(f"the engine process failed: {self.failure}")

    def _on_exit(self, how: str) -> None:
        if self._stopping or self._child is None:
            return
        limits = self._supervision
        self._lose(how)
        self._child.close()
        self._child = None
        self._past_stats = self._process_stats.plus_totals_of(self._past_stats)
        self._process_stats = EngineStats()
        logger.error("the engine process exited: %s", self.failure, extra={"model": self._name})
        if self.info is None:
            self._give_up(f"{self.failure}")
        elif self._may_restart():
            times = f"{len(self._restarts)} of {limits.restarts} times"
            logger.warning("starting the engine again, %s", times, extra={"model": self._name})
            self.spawn()
            self._attach()
        else:
            times = f"more than {limits.restarts} times in {limits.window_seconds / 60:g} minutes"
            self._give_up(f"it died {times}, the last time because: {self.failure}")

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._supervision.window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._supervision.restarts:
            return False
        self._restarts.append(now)
        return True

    def _give_up(self, reason: str) -> None:
        assert self._started is not None
        assert self._failed is not None
        if not self._started.done():
            self._started.set_exception(EngineStartFailed(reason))
        if not self._failed.done():
            self._failed.set_result(reason)

    # -- the watchdog

    async def _watch(self) -> None:
        """Kill a process that is silent for too long.

        Silence is counted in ticks of this loop: a server that was itself stopped or starved does
        not blame the engine for it.
        """
        limits = self._supervision
        tick = min(1.0, limits.silence_seconds / 10)
        while True:
            await asyncio.sleep(tick)
            if self._child is None:
                continue
            self._child.link.receive_waiting()
            if self._serving:
                self._silent_seconds = self._silent_seconds + tick if self.outstanding else 0.0
                if self._silent_seconds >= limits.silence_seconds:
                    await self._kill_hung(
                        f"it sent no message for {limits.silence_seconds:g} s while it had work"
                    )
            else:
                self._loading_seconds += tick
                if self._loading_seconds >= limits.start_seconds:
                    await self._kill_hung(f"not ready {limits.start_seconds:g} s after its start")

    async def _kill_hung(self, reason: str) -> None:
        assert self._child is not None
        logger.error(
            "the engine process is killed: %s; its stacks follow",
            reason,
            extra={"model": self._name},
        )
        child = self._child
        self._lose(reason)
        # faulthandler writes all stacks to stderr, even amid a hung step
        child.signal(signal.SIGUSR1)
        await asyncio.sleep(0.5)
        child.kill()
        await child.wait(5.0)
