"""The client of an engine process: it starts the process, sends requests, notices when the process
dies and restarts it.

    engine = EngineClient(folder, settings)
    engine.spawn()                 # the process begins to load; no event loop is needed yet
    await engine.start()           # returns when it serves; else EngineStartFailed has the reason
    async for output in engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling)): ...

When the process dies, its requests fail at once with the reason, and it is restarted a limited
number of times; then `wait_failed` returns and the server exits. The process sends messages also
while it has no work. One that is silent for a moment without computing is not ready, nor is one
that a signal has stopped. One that is silent or stopped for too long must write its stacks, is
killed, and counts as dead. This module does not import torch.

A server of several processes has this client in its primary one. The others use a `LinkedEngine`,
at the path that `link_path` returns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.engine.messages import (
    FRONTEND_SHIFT,
    RECENT_STEPS,
    EngineInfo,
    EngineStats,
    Shutdown,
    StatsPeriod,
    StepOutputs,
    StepRecord,
)
from slipstream.engine.request import GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.child import ENGINE_COMMAND, EngineChild
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.link import EngineFailed, FromEngine
from slipstream.server.engine_link.mailbox import InFlightRequest, LinkedRequests
from slipstream.server.engine_link.past_totals import PastTotals, Predecessor
from slipstream.server.engine_link.serve import STATS_SECONDS
from slipstream.server.engine_link.silence import Responsiveness
from slipstream.server.log.output import HANDLER

logger = logging.getLogger(__name__)

_UNLOAD_SECONDS = 10.0  # longest wait for the end of a process that is unloaded
_TICK_SECONDS = 0.25  # interval at which silence is counted


class EngineStartFailed(Exception):
    """The engine failed before it could serve. The text is the cause."""


@dataclass(frozen=True)
class Supervision:
    """The limits of an engine process: restarts, silence, and the duration of a start."""

    restarts: int = 3  # restarts allowed within the window
    window_seconds: float = 600.0
    silence_seconds: float = 60.0  # longest time without a message
    start_seconds: float = 300.0  # longest time from the start of the process until it serves
    # an engine without requests for this long is unloaded, until the next request; 0: never
    idle_seconds: float = 0.0


class EngineClient:
    def __init__(
        self,
        engine_folder: str | Path,
        settings: EngineSettings = EngineSettings(),
        supervision: Supervision = Supervision(),
        command: Sequence[str] = ENGINE_COMMAND,
        name: str = "",
        frontends: int = 1,
        ids: Iterator[int] | None = None,
        hosts: RankHosts | None = None,
        process: int = 0,
        replica: int | None = None,
    ) -> None:
        """name: name of the engine model in the log
        frontends: processes of the server
        ids: ids of requests, which replicas share; None: those of one engine
        hosts: of its ranks on other machines; None: all ranks are on this one
        process: of the launcher, if it is another one that starts all ranks
        replica: number of this engine among those of its model; None: it is the only one
        """
        self.info: EngineInfo | None = None
        self.on_stats: Callable[[], None] | None = None
        # called each time a process begins to serve, for the first time and after a restart
        self.on_serving: Callable[[], None] = lambda: None
        # called with the reason each time a process that served has failed
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._verbose = False  # the process sends its statistics after each step
        self._process_stats = EngineStats()  # latest statistics of the current process
        self.last_steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._past = PastTotals()
        self._start_child = partial(
            EngineChild, command, str(engine_folder), settings, name, frontends, hosts, process
        )
        self._one_process = frontends == 1  # all requests of the engine are this process's
        self._supervision = supervision
        self._name = name
        self._title = "the engine" if replica is None else f"replica {replica}"  # in the log
        self._requests = LinkedRequests(ids or request_ids())
        self._child: EngineChild | None = None
        self._lost = False  # the process has failed, but may not have ended yet
        self._stopping = False
        self._restarts: deque[float] = deque()
        self._responsiveness = Responsiveness(supervision.silence_seconds)
        self._loading_seconds = 0.0
        self._idle_seconds = 0.0
        self._unloading = False
        self._spawned = 0.0  # time of the start of the process
        self._started: asyncio.Future[None] | None = None
        self._failed: asyncio.Future[str] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    # -- requests

    @property
    def ready(self) -> bool:
        """Return whether it serves, accepts new work and responds, or will when a request comes."""
        if self._requests.asleep:
            return self.failure is None and not self._requests.draining
        accepts = self._requests.serving and not self._requests.draining
        return accepts and self._responsiveness.responds

    @property
    def failure(self) -> str | None:
        """Return why it does not serve; None while it serves or loads for the first time."""
        return self._requests.failure

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics. Totals never fall, though each process counts from zero."""
        return self._past.added_to(self._process_stats)

    def continue_counters_of(self, predecessor: Predecessor) -> None:
        """Add the totals of the engine that this one replaces, which may still finish its work."""
        self._past.predecessor = predecessor

    def drop_ended_predecessor(self) -> None:
        """Keep the totals of a predecessor that has ended, and no longer the predecessor."""
        self._past.drop_ended()

    @property
    def totals_are_final(self) -> bool:
        """Return whether it has ended, and so have the engines that it replaced."""
        return self.info is None and self._past.are_final

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """The clients of all processes: this one."""
        return (self,)

    @property
    def processes(self) -> int:
        """The number of processes that have served. A new one has an empty cache."""
        return self._requests.processes

    def has(self, request_id: int) -> bool:
        """Return whether this front end has this request in flight here."""
        return self._requests.has(request_id)

    @property
    def outstanding(self) -> int:
        """The number of requests of this front end in flight."""
        return self._requests.outstanding

    @property
    def process_id(self) -> int | None:
        """The id of the engine process; None while there is none on this machine."""
        return None if self._child is None else self._child.process_id

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes of all ranks; empty while there are none."""
        return [] if self._child is None else self._child.process_ids

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        self._follow_log_level()
        self._idle_seconds = 0.0
        return self._requests.submit(request)

    # -- other front ends

    @property
    def serving(self) -> bool:
        """Return whether there is a process that serves."""
        return self._child is not None and self._requests.serving

    def watch_outstanding(self, on_count: Callable[[int], None]) -> None:
        """Call this with the number of this front end's requests whenever it changes."""
        self._requests.watch_outstanding(on_count)

    def link_path(self, index: int) -> str:
        """Return the path where front end `index` reaches the process that serves now."""
        assert self._child is not None, "only while it serves"
        return self._child.link_path(index)

    def drop_frontend(self, index: int) -> None:
        """Cancel all requests of a front end that has ended. `link_path` then changes."""
        if self._child is not None and self._requests.serving:
            self._child.drop_frontend(index)

    # -- start and stop

    def spawn(self) -> None:
        """Start the process. Call this from the main thread: the kernel kills the process when the
        calling thread ends.
        """
        self._child = self._start_child()
        self._loading_seconds = 0.0
        self._spawned = time.monotonic()
        self._responsiveness = Responsiveness(self._supervision.silence_seconds)
        self._lost = False
        self._verbose = False

    async def start(self) -> None:
        """Return when the engine serves. EngineStartFailed has the reason if it does not."""
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
        """Refuse new requests and continue with those in flight."""
        self._requests.draining = True

    async def wait_drained(self) -> None:
        """Wait for the requests of this front end."""
        await self._requests.wait_drained()

    async def stop(self, patience_seconds: float = 5.0) -> None:
        """End the process. Requests still in flight fail."""
        self._stopping = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._requests.end()
        child = self._child
        if child is None:
            return
        if self._requests.serving and child.link.send(Shutdown()):
            await child.wait(patience_seconds)
        child.kill()
        await child.wait(patience_seconds)
        child.close()
        self._child = None

    def mark_ended(self) -> None:
        """Note that the process has ended, so that the statistics are final."""
        self.info = None

    def kill(self) -> None:
        """End the process now, without an event loop."""
        self._stopping = True
        self._requests.end()
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child.reap()
            self._child = None

    def abandon(self) -> None:
        """Kill the process and remove its files, from any thread, before this process ends."""
        if (child := self._child) is not None:
            child.abandon()

    # -- messages and exit of the process

    def _attach(self) -> None:
        child = self._child
        assert child is not None

        def take(message: FromEngine) -> None:
            if not isinstance(message, EngineFailed):
                self._on_message(message)
            elif child is self._child and not self._stopping:
                self._lose(message.reason)  # an engine that is stopped or unloaded does not fail

        def note_exit(how: str) -> None:
            if child is self._child:  # a rank may end after the next child starts
                self._on_exit(how)

        child.attach(take, note_exit, lambda: self._lost)

    def _on_message(self, message: FromEngine) -> None:
        self._responsiveness.heard = True
        if isinstance(message, StepOutputs):
            self._requests.deliver(message)
        elif isinstance(message, EngineStats):
            stepped = message.steps != self._process_stats.steps
            self._process_stats = message
            self.last_steps.extend(message.recent_steps)
            self._follow_log_level()
            if stepped and self._verbose and self.on_stats is not None:
                self.on_stats()
        elif isinstance(message, EngineInfo):
            self._begin_to_serve(message)

    def _follow_log_level(self) -> None:
        """Ask for statistics after each step while verbose lines are logged."""
        verbose = HANDLER.settings.verbose_level > 0
        if verbose != self._verbose and self._requests.serving:
            self._verbose = verbose
            self._ask_for_stats()

    def _ask_for_stats(self) -> None:
        """Have the process send its statistics now, and then regularly while it has work."""
        if self._child is not None:
            self._child.link.send(StatsPeriod(0.0 if self._verbose else STATS_SECONDS))

    def _begin_to_serve(self, info: EngineInfo) -> None:
        assert self._child is not None
        assert self._started is not None
        self._child.unlink_sockets()
        self.info = info
        self._requests.serve(self._child.link)
        self.on_serving()
        if not self._started.done():
            self._started.set_result(None)
        else:
            seconds = time.monotonic() - self._spawned
            logger.info(
                "%s serves again, after %.1f s",
                self._title,
                seconds,
                extra={"model": self._name},
            )

    def _lose(self, reason: str) -> None:
        """Fail all requests in flight. The first reason that is given is the cause."""
        if self._lost:
            return
        self._lost = True
        served = self._requests.serving
        self._requests.lose(reason)
        if served:
            self.on_lost(reason)

    def _on_exit(self, how: str) -> None:
        if self._stopping or self._child is None:
            return
        limits = self._supervision
        self._lose(how)
        self._child.close()
        self._child = None
        self._past.add(self._process_stats)
        self._process_stats = EngineStats()
        context = {"model": self._name}
        logger.error("%s process exited: %s", self._title, self.failure, extra=context)
        if self._requests.asleep:
            return  # it could not be loaded again; the next request tries
        if self.info is None:
            self._give_up(f"{self.failure}")
        elif self._may_restart():
            times = f"{len(self._restarts)} of {limits.restarts} times"
            logger.warning("starting %s again, %s", self._title, times, extra=context)
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
        tick = min(_TICK_SECONDS, limits.silence_seconds / 10)
        while True:
            await asyncio.sleep(tick)
            if self._child is None:
                continue
            self._child.link.receive_some()
            self._responsiveness.note_state(self._child.state, tick)
            if self._requests.serving:
                on_cpu = self.info is not None and self.info.device == "cpu"
                self._responsiveness.count_silence(
                    tick, self._has_requests, on_cpu, all_known=self._one_process
                )
            if reason := self._responsiveness.find_hang():
                await self._kill_hung(reason)
            elif self._requests.serving:
                if limits.idle_seconds:
                    await self._count_idle(tick)
            elif not self._child.awaits_hosts:
                self._loading_seconds += tick
                if self._loading_seconds >= limits.start_seconds:
                    await self._kill_hung(f"not ready {limits.start_seconds:g} s after its start")

    @property
    def _has_requests(self) -> bool:
        """Return whether there are requests, of any front end."""
        stats = self._process_stats
        return bool(self.outstanding or stats.running or stats.waiting)

    # -- unloaded while idle

    async def _count_idle(self, seconds: float) -> None:
        """Unload an engine that has been without a request for long enough."""
        self._idle_seconds = 0.0 if self.outstanding else self._idle_seconds + seconds
        if self._idle_seconds >= self._supervision.idle_seconds:
            await self._unload()

    async def _unload(self) -> None:
        """End the process. The next request starts another one, and waits for it."""
        child = self._child
        assert child is not None
        context = {"model": self._name}
        logger.info("%s: %s is unloaded: it was idle", self._name, self._title, extra=context)
        self._child = None  # its exit is no failure
        self._unloading = True
        self._requests.sleep(self._load_again)
        try:
            child.link.send(Shutdown())
            await child.wait(_UNLOAD_SECONDS)
        finally:
            child.kill()
            child.close()
            self._unloading = False
        self._past.add(self._process_stats)
        self._process_stats = EngineStats()
        if self._requests.held:
            self._load_again()

    def _load_again(self) -> None:
        """Start a process for the requests that wait, unless one starts or the last one ends."""
        if self._child is None and not self._unloading and not self._stopping:
            self._idle_seconds = 0.0
            self.spawn()
            self._attach()

    async def _kill_hung(self, reason: str) -> None:
        assert self._child is not None
        logger.error(
            "%s process is killed: %s; its stacks follow",
            self._title,
            reason,
            extra={"model": self._name},
        )
        child = self._child
        self._lose(reason)
        # faulthandler writes all stacks to stderr, even amid a hung step
        child.show_stacks()
        await asyncio.sleep(0.5)
        child.kill()
        await child.wait(5.0)


def request_ids(index: int = 0) -> Iterator[int]:
    """Return the ids of the requests of this front end.

    A front end that takes the place of an ended one must not use its ids again: the engine may
    still send outputs of that one's requests. So its ids begin with the time, in microseconds since
    the machine started. The primary front end has no predecessor at its engines.
    """
    if index == 0:
        return itertools.count(1)
    since_start = time.monotonic_ns() // 1000 % (1 << FRONTEND_SHIFT - 1)
    return itertools.count((index << FRONTEND_SHIFT) + since_start + 1)
