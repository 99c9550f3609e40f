"""The secondary front ends of a server, seen from the primary one.

The primary front end starts the others and restarts those that end. It tells them which models and
engines there are, adds up what they count, and answers what they forward.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.server.engine_link.client import EngineClient
from slipstream.server.engine_link.pool import EnginePool, PooledEngine
from slipstream.server.engine_link.replicas import Replicas
from slipstream.server.frontends.forwarded_calls import ForwardedCalls
from slipstream.server.frontends.in_flight import SLOTS, InFlightTable
from slipstream.server.frontends.member import Member
from slipstream.server.frontends.messages import (
    Counted,
    EngineUse,
    Follow,
    FrontendOptions,
    LinkedEngineState,
    ModelState,
)
from slipstream.server.frontends.upstream import HTTP
from slipstream.server.http.server import HttpServer
from slipstream.server.kserve.inference import (
    InferRequest,
    ModelVersion,
    ResponseStream,
    ServedModel,
    WrappedModel,
)
from slipstream.server.log.output import HANDLER
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.build import Recipe
from slipstream.server.models.generating import ServedEngine
from slipstream.server.models.token_model import TokenModel

logger = logging.getLogger(__name__)

RESTARTS = 10  # restarts allowed for one front end within the window
WINDOW_SECONDS = 600.0
_LONGEST_DELAY_SECONDS = 10.0
_POLL_SECONDS = 0.01
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class LinkedModel:
    """A model over engines that is loaded."""

    recipe: Recipe
    versions: tuple[int, ...]
    engines: Mapping[str, ServedEngine]
    load: int  # number of its load


@dataclass(frozen=True)
class ServerView:
    """The state of the server that secondary front ends need, read when it is sent."""

    models: Callable[[], Iterable[LinkedModel]]
    listening: Callable[[], bool]
    draining: Callable[[], bool]
    tracing: Callable[[], bool]


@dataclass(frozen=True)
class _Place:
    """The numbers and the row of one engine process."""

    engine: int  # replicas have the same
    number: int
    slot: int


class Frontends:
    def __init__(
        self,
        count: int,
        options: FrontendOptions,
        http: Sequence[socket.socket],
        engines: EnginePool,
    ) -> None:
        """`count`: all front ends, the primary one included. `http`: the ports of the others."""
        self.table = InFlightTable(count)
        self._engines = engines
        self._places: dict[EngineClient, _Place] = {}
        self._reasons: dict[EngineClient, str] = {}  # why the latest process failed
        self._leaving: set[EngineClient] = set()  # unloaded engines that still have requests
        self._freed: set[int] = set()  # rows of ended engines that other front ends may still write
        self._last_engine = 0  # number of the last engine or replica
        self._number = 0  # of the last state or collection
        self._view: ServerView | None = None
        self._metrics: ServerMetrics | None = None
        self._http: HttpServer | None = None
        self._calls: ForwardedCalls | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts: dict[int, deque[float]] = {}
        self._closing = False
        self._members = [
            Member(
                index,
                count,
                options,
                self.table.descriptor,
                http[index - 1] if http else None,
                self,
            )
            for index in range(1, count)
        ]
        for engine in engines:
            self._watch_engine(engine)
        engines.on_create = self._watch_engine
        engines.wait_drained_elsewhere = self._release_engine
        engines.on_released = lambda engine: self._run_later(self._forget_engine(engine))
        engines.count_elsewhere = self._count_elsewhere

    # -- start and stop

    def spawn(self) -> None:
        """Start the processes, before there is an event loop."""
        for member in self._members:
            member.spawn()

    async def attach(
        self,
        view: ServerView,
        metrics: ServerMetrics,
        http: HttpServer,
        calls: ForwardedCalls,
    ) -> None:
        """Begin to exchange messages. `http` and `calls` answer what the others forward."""
        self._view = view
        self._metrics = metrics
        self._http = http
        self._calls = calls
        metrics.collect = self.collect
        metrics.add_source(self._families)
        for member in self._members:
            await member.attach()
        self._run_later(self._watch())

    async def _watch(self) -> None:
        """Kill the processes that hang."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for member in self._members:
                member.pass_time(_WATCH_SECONDS)

    async def settle(self) -> None:
        """Return when all front ends have the models, engines and settings of this one."""
        if self._view is not None:
            await asyncio.gather(*(member.follow(self._state(member)) for member in self._members))

    async def collect(self) -> None:
        """Return when all that other front ends have counted is added."""
        self._number += 1
        number = self._number
        await asyncio.gather(*(member.collect(number) for member in self._members))

    async def wait_drained(self) -> None:
        """Wait until no other front end has a request in flight."""
        while self.outstanding:
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def _draining(self) -> bool:
        return self._view is not None and self._view.draining()

    @property
    def outstanding(self) -> int:
        """The requests that other front ends have in flight."""
        return sum(self.table.count_frontend(member.index) for member in self._members)

    async def close(self, seconds: float) -> None:
        """Give the others time to finish the responses that they send, and end them."""
        self._closing = True
        await asyncio.gather(*(member.close(seconds) for member in self._members))
        if self._calls is not None:
            await self._calls.close(0)
        for task in self._tasks:
            task.cancel()

    def kill(self) -> None:
        """End the processes now, without an event loop."""
        self._closing = True
        for member in self._members:
            member.kill()
        for member in self._members:
            member.reap()

    def abandon(self) -> None:
        """End the processes, from any thread, before this process ends."""
        for member in self._members:
            member.kill()

    # -- the state of the server

    def _state(self, member: Member) -> Follow:
        assert self._view is not None
        self._number += 1
        return Follow(
            self._number,
            [self._engine_state(client, member.index) for client in self._places],
            [self._model_state(model) for model in self._view.models()],
            self._view.listening(),
            self._view.draining(),
            self._view.tracing(),
            HANDLER.settings,
        )

    def _engine_state(self, client: EngineClient, index: int) -> LinkedEngineState:
        place = self._places[client]
        path = client.link_path(index) if client.serving else ""
        reason = self._reasons.get(client, "")
        return LinkedEngineState(
            place.engine,
            place.number,
            place.slot,
            path,
            client.failure or reason,
            client in self._leaving,
        )

    def _model_state(self, model: LinkedModel) -> ModelState:
        engines = {
            name: EngineUse(engine.model, self._number_of(engine))
            for name, engine in model.engines.items()
        }
        return ModelState(model.recipe, model.versions, engines, model.load)

    def _number_of(self, engine: ServedEngine) -> int:
        client = engine.generator.client
        if isinstance(client, EngineClient | Replicas):
            place = self._places.get(client.clients[0])
            return 0 if place is None else place.engine
        return 0

    # -- engines

    def _watch_engine(self, engine: PooledEngine) -> None:
        for client in engine.clients:
            client.on_serving = partial(self._on_serving, engine)
            client.on_lost = partial(self._on_lost, client)
        if isinstance(engine, Replicas):
            engine.count_with(self._count_client_elsewhere)

    def _on_lost(self, client: EngineClient, reason: str) -> None:
        # The process may serve again before the state of its failure is sent.
        self._reasons[client] = reason
        self._run_later(self.settle())

    def _on_serving(self, engine: PooledEngine) -> None:
        if engine.clients[0] not in self._places:
            self._place(engine)
        self._run_later(self.settle())

    def _place(self, engine: PooledEngine) -> None:
        """Number an engine and its replicas, and give each replica a row."""
        self._last_engine += 1
        number = self._last_engine
        for client in engine.clients:
            taken = self._freed | {place.slot for place in self._places.values()}
            slot = next(slot for slot in range(1, SLOTS) if slot not in taken)
            self._last_engine += 1
            self.table.clear_slot(slot)
            self._places[client] = _Place(number, self._last_engine, slot)
            client.watch_outstanding(self.table.writer(slot, 0))

    async def _release_engine(self, engine: PooledEngine) -> None:
        """Wait until no other front end uses an engine that leaves."""
        if engine.clients[0] in self._places:
            self._leaving.update(engine.clients)
            await self.settle()
            while self._count_elsewhere(engine):
                await asyncio.sleep(_POLL_SECONDS)

    async def _forget_engine(self, engine: PooledEngine) -> None:
        """Have the other front ends drop an engine that has ended, with the requests it had."""
        places = [self._places.pop(client) for client in engine.clients if client in self._places]
        if places:
            self._leaving.difference_update(engine.clients)
            for client in engine.clients:
                self._reasons.pop(client, None)
            slots = {place.slot for place in places}
            self._freed |= slots
            await self.settle()
            self._freed -= slots

    def _count_elsewhere(self, engine: PooledEngine) -> int:
        return sum(map(self._count_client_elsewhere, engine.clients))

    def _count_client_elsewhere(self, client: EngineClient) -> int:
        place = self._places.get(client)
        return 0 if place is None else self.table.count_others(place.slot, 0)

    # -- requests that stop others

    def wrap(self, entry: ModelVersion) -> ServedModel:
        """Return the model, with requests that stop others passed on to all front ends."""
        model = entry.model
        if isinstance(model.unwrapped, TokenModel):
            return _StoppedEverywhere(model, model.unwrapped, entry.name, self._stop_requests)
        return model

    def _stop_requests(self, model: str, request_id: str) -> None:
        for member in self._members:
            member.stop_requests(model, request_id)

    # -- called by members

    def on_counted(self, index: int, message: Counted) -> None:
        assert self._metrics is not None
        self._metrics.add_increments(index, message.increments)

    def on_connection(self, kind: bytes, connection: socket.socket) -> None:
        assert self._http is not None
        assert self._calls is not None
        if kind == HTTP:
            self._run_later(self._http.adopt(connection))
        else:
            self._calls.serve(connection)

    def on_exit(self, index: int, how: str) -> None:
        for client in self._places:
            client.drop_frontend(index)
        self.table.clear_frontend(index)
        if self._metrics is not None:
            self._metrics.drop_frontend(index)
        member = self._members[index - 1]
        if self._closing or member.leaving or self._draining:
            return
        delay = self._next_delay(index)
        if delay is None:
            member.stop_listening()
            logger.error(
                "front end %d ended: %s; it ended more than %d times in %g minutes and is not "
                "started again",
                index,
                how,
                RESTARTS,
                WINDOW_SECONDS / 60,
            )
            return
        logger.warning(
            "front end %d ended: %s; its clients are disconnected, starting it again", index, how
        )
        self._run_later(self._restart(member, delay))

    def _next_delay(self, index: int) -> float | None:
        """Return the seconds to wait before the restart of a front end; None: no restart."""
        now = time.monotonic()
        restarts = self._restarts.setdefault(index, deque())
        while restarts and now - restarts[0] > WINDOW_SECONDS:
            restarts.popleft()
        if len(restarts) >= RESTARTS:
            return None
        restarts.append(now)
        return min(_LONGEST_DELAY_SECONDS, 0.1 * (1 << len(restarts) - 1))

    async def _restart(self, member: Member, delay: float) -> None:
        await asyncio.sleep(delay)
        if self._closing or self._draining:
            return
        try:
            member.spawn()
        except OSError as error:  # too many processes or open files
            self.on_exit(member.index, f"it cannot be started: {error.strerror}")
            return
        await member.attach()
        await member.follow(self._state(member))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _families(self) -> Iterable[Family]:
        yield Family(
            "slipstream_frontend_requests_total",
            "counter",
            "Requests that a front end has sent to engines",
            [
                ({"frontend": str(index)}, self.table.total(index))
                for index in range(len(self._members) + 1)
            ],
        )


class _StoppedEverywhere(WrappedModel):
    """A model of tokens. A request with an id that stops others does so at all front ends."""

    def __init__(
        self,
        model: ServedModel,
        tokens: TokenModel,
        name: str,
        stop: Callable[[str, str], None],
    ) -> None:
        super().__init__(model)
        self._tokens = tokens
        self._name = name
        self._stop = stop

    def infer(self, request: InferRequest) -> ResponseStream:
        if request.id and self._tokens.is_stop_request(request):
            self._stop(self._name, request.id)
        return self.inner.infer(request)
