"""The models that a secondary front end serves: those over engines, without state of their own.

A request that needs state which only the primary front end has raises NeedsPrimary: a model that is
not here, an adapter, a shared memory region, a running request of another front end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from slipstream.server.engine_link.client import request_ids
from slipstream.server.engine_link.engine import Engine
from slipstream.server.engine_link.linked import LinkedEngine
from slipstream.server.engine_link.replicas import LinkedReplicas
from slipstream.server.fields.adapters import FIELDS as ADAPTER_FIELDS
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.frontends.in_flight import InFlightTable
from slipstream.server.frontends.messages import EngineUse, LinkedEngineState, ModelState
from slipstream.server.kserve.errors import InferenceError, NeedsPrimary
from slipstream.server.kserve.inference import (
    InferRequest,
    ModelRegistry,
    ModelVersion,
    ResponseStream,
    ServedModel,
    WrappedModel,
)
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.build import load_engine, served_model
from slipstream.server.models.generating import ServedEngine
from slipstream.server.models.token_model import TokenModel
from slipstream.server.text.chat import ChatOptions

logger = logging.getLogger(__name__)

_SERVE_SECONDS = 10.0  # longest wait for an engine that serves to connect


class LocalRegistry(ModelRegistry):
    """The models that are here. The primary front end knows about all others."""

    def find(self, name: str, version: str = "") -> ModelVersion:
        try:
            return super().find(name, version)
        except InferenceError as error:
            raise NeedsPrimary from error

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            raise NeedsPrimary
        return True


class PrimaryMemory(SharedMemory):
    """The regions of the primary front end: there are none here."""

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        raise NeedsPrimary

    def check_places(self, places: Iterable[object]) -> None:
        if any(place is not None for place in places):
            raise NeedsPrimary


class PrimaryAdapters(AdapterRegistry):
    """The adapters of the primary front end: there are none here."""

    def names(self) -> list[str]:
        raise NeedsPrimary

    def has(self, name: str) -> bool:
        raise NeedsPrimary


class LocalModel(WrappedModel):
    """A model that answers the requests which need nothing of other processes."""

    def __init__(self, model: ServedModel, input_fields: dict[str, str]) -> None:
        """`input_fields`: name of an input → request field."""
        super().__init__(model)
        named = {name for name, field in input_fields.items() if field in ADAPTER_FIELDS}
        self._adapter_inputs = named | set(ADAPTER_FIELDS)

    def check_served_here(self, request: InferRequest) -> None:
        if not self._adapter_inputs.isdisjoint(request.inputs):
            raise NeedsPrimary
        if request.parameters and not self._adapter_inputs.isdisjoint(request.parameters):
            raise NeedsPrimary
        model = self.inner.unwrapped
        if isinstance(model, TokenModel) and _stops_elsewhere(model, request):
            raise NeedsPrimary

    def infer(self, request: InferRequest) -> ResponseStream:
        self.check_served_here(request)
        return self.inner.infer(request)


def _stops_elsewhere(model: TokenModel, request: InferRequest) -> bool:
    """Return whether a request may stop requests of other front ends."""
    if not model.is_stop_request(request):
        return False
    return bool(request.id) or not model.stops.finds(request)


class LocalModels:
    """Follows the models and engines of the primary front end."""

    def __init__(
        self,
        registry: LocalRegistry,
        metrics: ServerMetrics,
        chat: ChatOptions,
        index: int,
        table: InFlightTable,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._chat = chat
        self._index = index
        self._table = table
        self._models: dict[str, ModelState] = {}
        self._engines: dict[int, LinkedEngine] = {}  # by number of the replica
        self._sockets: dict[int, str] = {}  # number of a replica → socket that it is linked by
        self._replicas: dict[int, list[LinkedEngineState]] = {}  # by number of the engine
        self._clients: dict[int, Engine] = {}  # by number of the engine
        # Front end and time make ids unique; replicas must not use the same ones.
        self._ids = request_ids(index)
        self._served: dict[tuple[int, str], ServedEngine] = {}
        self._input_fields: dict[str, dict[str, str]] = {}
        registry.wrap(metrics.count)
        registry.wrap(self._guard)

    def __iter__(self) -> Iterator[Engine]:
        return iter([self._client(number) for number in list(self._replicas)])

    def _guard(self, entry: ModelVersion) -> ServedModel:
        return LocalModel(entry.model, self._input_fields.get(entry.name, {}))

    async def follow(
        self, engines: list[LinkedEngineState], models: list[ModelState], shuts_down: bool
    ) -> None:
        """Serve these models with these engines. Requests in flight continue."""
        self._replicas = {}
        for state in engines:
            self._replicas.setdefault(state.engine, []).append(state)
            self._follow_engine(state, shuts_down)
        await asyncio.gather(*(self._wait_serving(state) for state in engines))
        for model in models:
            if self._models.get(model.recipe.model.name) != model:
                await self._replace(model)
        # New requests go to the engines of the new models from here on.
        for state in engines:
            if state.draining:
                self._engines[state.number].begin_drain()
        wanted = {model.recipe.model.name for model in models}
        for name in [name for name in self._models if name not in wanted]:
            del self._models[name]
            self._registry.retire(name)
            self._metrics.forget(name)
        self._drop_engines({state.number for state in engines})
        self._forget_clients()

    def _follow_engine(self, state: LinkedEngineState, shuts_down: bool) -> None:
        engine = self._engines.get(state.number)
        if engine is None:
            engine = self._engines[state.number] = LinkedEngine(self._index, self._ids)
            engine.watch_outstanding(self._table.writer(state.slot, self._index))
        former = self._sockets.get(state.number, "")
        if former and state.socket != former:
            if shuts_down and not state.failure:
                engine.close()
            else:
                engine.lose(state.failure or "it was restarted")
        if state.socket and state.socket != former:
            engine.attach(state.socket)
        self._sockets[state.number] = state.socket

    async def _wait_serving(self, state: LinkedEngineState) -> None:
        if state.socket:
            engine = self._engines[state.number]
            try:
                await asyncio.wait_for(engine.wait_serving(), _SERVE_SECONDS)
            except TimeoutError:
                logger.warning("an engine did not connect to front end %d", self._index)

    def begin_drain(self) -> None:
        """Refuse new requests and continue with those in flight."""
        for engine in self._engines.values():
            engine.begin_drain()

    async def _replace(self, state: ModelState) -> None:
        recipe = state.recipe
        engines = {name: await self._engine(use) for name, use in state.engines.items()}
        model = served_model(recipe, engines.__getitem__, self._registry)
        name = recipe.model.name
        if isinstance(model, TokenModel):
            self._input_fields[name] = dict(model.input_fields)
        elif recipe.pipeline is not None:
            self._input_fields[name] = dict(recipe.pipeline.fields.inputs)
        self._registry.replace(name, dict.fromkeys(state.versions, model))
        self._models[name] = state

    async def _engine(self, use: EngineUse) -> ServedEngine:
        """Return an engine with its tokenizer; models that use the same process share it."""
        key = use.number, use.model.name
        found = self._served.get(key)
        # Without a process, the files may be others than at the last load.
        if found is None or found.model != use.model or not use.number:
            client = self._client(use.number) if use.number else LinkedEngine(self._index)
            found = await load_engine(use.model, client, self._chat, PrimaryAdapters())
            if use.number:
                slots = tuple(state.slot for state in self._replicas[use.number])
                found = replace(found, outstanding_elsewhere=partial(self._count_others, slots))
            self._served[key] = found
        return found

    def _client(self, number: int) -> Engine:
        """Return the engine of this number: one link, or those to all of its replicas."""
        found = self._clients.get(number)
        if found is None:
            states = self._replicas[number]
            engines = [self._engines[state.number] for state in states]
            found = engines[0]
            if len(engines) > 1:
                slots = [state.slot for state in states]
                found = LinkedReplicas(engines, lambda index: self._count_others((slots[index],)))
            self._clients[number] = found
        return found

    def _count_others(self, slots: tuple[int, ...]) -> int:
        """Return the requests that other front ends have in flight at replicas."""
        return sum(self._table.count_others(slot, self._index) for slot in slots)

    def _drop_engines(self, wanted: set[int]) -> None:
        for number in [number for number in self._engines if number not in wanted]:
            self._engines.pop(number).close()
            self._sockets.pop(number, None)

    def _forget_clients(self) -> None:
        """Forget the engines that are not among those of the last state."""
        for number in [number for number in self._clients if number not in self._replicas]:
            del self._clients[number]
        self._served = {
            key: served
            for key, served in self._served.items()
            if key[0] == 0 or key[0] in self._replicas
        }
