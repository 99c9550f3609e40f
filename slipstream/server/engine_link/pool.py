"""The engine processes of a server, by the name of their engine model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.engine.memory.shares import Demand, memory_shares
from slipstream.engine.options import flag
from slipstream.engine.settings import EngineSettings
from slipstream.repository.models import EngineModel
from slipstream.server.engine_link.client import EngineClient, Supervision, request_ids
from slipstream.server.engine_link.cluster.division import ReplicaSite
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.launched import Launched
from slipstream.server.engine_link.rank_choice import (
    choose_ranks,
    explain_ranks,
    explain_sites,
    find_sites,
    spans_machines,
)
from slipstream.server.engine_link.replicas import Replicas
from slipstream.server.engine_link.visible_gpus import visible_gpus
from slipstream.weights.engine_config import weight_bytes
from slipstream.weights.shards import check_ranks

logger = logging.getLogger(__name__)

PooledEngine = EngineClient | Replicas


class EnginePool:
    """The engines that serve, load or drain. They are added and removed while the server runs."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        supervision: Supervision,
        command: Sequence[str],
        hosts: RankHosts | None = None,
    ) -> None:
        """hosts: of ranks on other machines"""
        self._settings = settings  # they override those of the repository
        self._supervision = supervision
        self._command = command
        self._hosts = hosts
        self._launched = Launched() if hosts is None else hosts.launched
        # memory that models need, by name: those that run, and those that the server starts with
        self._demands: dict[str, Demand] = {}
        # engines that serve, load, or have failed while serving
        self._clients: dict[str, PooledEngine] = {}
        self._starting: dict[PooledEngine, asyncio.Future[None]] = {}
        self._leaving: set[PooledEngine] = set()
        # tasks that end when an engine in use has failed for good
        self._watched: dict[asyncio.Task[str], PooledEngine] = {}
        self._changed: asyncio.Event | None = None
        # called when an engine is added or removed
        self.on_change: Callable[[], None] = lambda: None
        self.frontends = 1  # processes of the server, each with a link to every engine
        # called with each new engine, before its process starts
        self.on_create: Callable[[PooledEngine], None] = lambda client: None
        # returns the requests that other front ends have in flight at an engine
        self.count_elsewhere: Callable[[PooledEngine], int] = lambda client: 0
        # waits until the other front ends have no request at an engine that leaves
        self.wait_drained_elsewhere: Callable[[PooledEngine], Awaitable[None]] = _no_others
        # called when the process of an engine that was unloaded or replaced has ended
        self.on_released: Callable[[PooledEngine], None] = lambda client: None

    def __iter__(self) -> Iterator[PooledEngine]:
        return iter(list(self._clients.values()))

    def items(self) -> list[tuple[str, PooledEngine]]:
        return list(self._clients.items())

    @property
    def outstanding(self) -> int:
        return sum(client.outstanding for client in (*self, *self._leaving))

    def create(self, model: EngineModel) -> PooledEngine:
        settings = replace(model.settings, **self._settings)
        chosen = self._choose(settings, model)
        # replicas on several machines have as many ranks as fit, whatever the processes there
        spread = settings.replicas > 1 and self._launched.elsewhere > 0
        if settings.ranks is None and not spread:
            explain_ranks(model.name, chosen, model.engine_config)
        client = self._create(model, self._with_share(model, chosen))
        self.on_create(client)
        return client

    def expect(self, models: Iterable[EngineModel]) -> None:
        """Leave memory for these models, which start together."""
        for model in models:
            settings = self._choose(replace(model.settings, **self._settings), model)
            self._demands[model.name] = self._demand(model, settings)

    def _with_share(self, model: EngineModel, settings: EngineSettings) -> EngineSettings:
        """Return the settings with the share of the memory beside the other models."""
        demands = self._demands | {model.name: self._demand(model, settings)}
        share = memory_shares(demands.values())[model.name]
        self._demands = demands
        if share < 1.0:
            logger.info("%s may take %.0f%% of the memory of its device", model.name, 100 * share)
        return replace(settings, memory_share=share)

    def _demand(self, model: EngineModel, settings: EngineSettings) -> Demand:
        gpus = visible_gpus(settings.device)
        ranks = settings.ranks or 1
        here = find_sites(settings, self._launched, gpus)[0].replicas  # on this machine
        processes = range(here * ranks)
        devices = settings.devices or [index % max(gpus, 1) for index in processes]
        given = settings.memory_share if settings.memory_share < 1.0 else None
        size = weight_bytes(model.engine_config.path)
        return Demand(model.name, given, size // ranks, tuple(devices))

    def _choose(self, settings: EngineSettings, model: EngineModel) -> EngineSettings:
        gpus = visible_gpus(settings.device)
        return choose_ranks(settings, model.engine_config, gpus, self._launched)

    def _create(self, model: EngineModel, settings: EngineSettings) -> PooledEngine:
        gpus = visible_gpus(settings.device)
        spans = spans_machines(settings, self._launched, gpus)
        ids = request_ids()  # shared: the replica of a request is found by its id

        def client(index: int, site: ReplicaSite) -> EngineClient:
            return EngineClient(
                model.engine_config.path,
                # the replicas of one machine divide it
                replace(settings, replicas=site.replicas, replica=site.replica),
                self._supervision,
                self._command,
                model.name,
                self.frontends,
                ids,
                self._hosts if spans or site.process else None,
                site.process,
                index if settings.replicas > 1 else None,
            )

        sites = find_sites(settings, self._launched, gpus)
        explain_sites(model.name, sites, self._launched, gpus)
        clients = [client(index, site) for index, site in enumerate(sites)]
        return clients[0] if len(clients) == 1 else Replicas(clients)

    def check(self, models: Iterable[EngineModel]) -> None:
        """Raise ValueError if a setting that overrides the repository's cannot be used."""
        longest = 0
        models = list(models)
        for model in models:
            longest = max(longest, model.engine_config.build.max_seq_len)
            try:
                settings = replace(model.settings, **self._settings)
                config = model.engine_config
                settings = self._choose(settings, model)
                gpus = visible_gpus(settings.device)
                spans_machines(settings, self._launched, gpus)
                find_sites(settings, self._launched, gpus)
                check_ranks(config.spec, config.quantisation, settings.ranks or 1)
            except ValueError as error:
                raise ValueError(f"{model.name}: {error}") from error
        self.expect(models)
        memory_shares(self._demands.values())
        self._demands = {}
        wanted = self._settings.get("max_sequence_tokens")
        if longest and wanted is not None and wanted > longest:
            raise ValueError(
                f"{flag('max_sequence_tokens')} {wanted} is more than the {longest} tokens that "
                "the engine was built for"
            )

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The settings that override the repository's."""
        return self._settings

    def spawn(self, model: EngineModel) -> None:
        """Start the process before there is an event loop; `start` waits for it later."""
        client = self._clients[model.name] = self.create(model)
        client.spawn()

    def watch_spawned(self) -> None:
        """Watch the spawned processes while they load."""
        for client in self:
            self._starting[client] = asyncio.ensure_future(client.start())

    async def start(self, model: EngineModel) -> PooledEngine:
        """Return an engine that serves. A spawned one is only waited for.

        EngineStartFailed says why the engine cannot serve.
        """
        client = self._clients.get(model.name)
        if client is None or client not in self._starting:
            client = self.create(model)
        try:
            await (self._starting.pop(client, None) or client.start())
        except BaseException:
            if self._clients.get(model.name) is client:
                del self._clients[model.name]
            self._leaving.add(client)  # so that `kill` finds it if there is no time to stop it
            await client.stop()
            self._leaving.discard(client)
            raise
        return client

    def adopt(self, name: str, client: PooledEngine) -> PooledEngine | None:
        """Make this the engine of that name. Return its predecessor, which must be released."""
        before = self._clients.get(name)
        if before is not None and before is not client:
            client.continue_counters_of(before)
        self._clients[name] = client
        self._watch(client)
        self.on_change()
        return before if before is not client else None

    def forget(self, name: str) -> PooledEngine | None:
        client = self._clients.pop(name, None)
        self._demands.pop(name, None)
        self.on_change()
        return client

    def forget_if(self, name: str, client: PooledEngine) -> None:
        """Forget the engine of that name if it is this one."""
        if self._clients.get(name) is client:
            self.forget(name)

    async def release(
        self, client: PooledEngine, patience_seconds: float, late_seconds: float = 0.0
    ) -> None:
        """Wait for its requests, then end its process and free its memory.

        late_seconds: for so long it takes requests that chose it before it was replaced
        """
        self._unwatch(client)  # its failure concerns only the requests that it still has
        self._leaving.add(client)
        try:
            if late_seconds:
                await asyncio.sleep(min(late_seconds, patience_seconds))
            client.begin_drain()
            async with asyncio.timeout(patience_seconds):
                await self.wait_drained_elsewhere(client)
                await client.wait_drained()
        except TimeoutError:
            outstanding = client.outstanding + self.count_elsewhere(client)
            logger.warning(
                "%d requests of an unloaded model still run and are given up", outstanding
            )
        finally:
            await client.stop()
            client.mark_ended()
            self._leaving.discard(client)
            for successor in (*self, *self._leaving):
                successor.drop_ended_predecessor()
            self.on_released(client)

    def begin_drain(self) -> None:
        for client in self:
            client.begin_drain()

    async def wait_drained(self) -> None:
        await asyncio.gather(*(client.wait_drained() for client in (*self, *self._leaving)))

    async def stop(self, patience_seconds: float = 5.0) -> None:
        """End all processes, at the latest after this time."""
        for task in self._watched:
            task.cancel()
        for start in self._starting.values():
            start.cancel()
        clients = (*self, *self._leaving)
        await asyncio.gather(*(client.stop(patience_seconds) for client in clients))

    def kill(self) -> None:
        for client in (*self, *self._leaving):
            client.kill()

    def abandon(self) -> None:
        """Kill all processes and remove their files, from any thread, before this process ends."""
        for client in (*self, *self._leaving):
            client.abandon()

    def _watch(self, client: PooledEngine) -> None:
        self._watched[asyncio.ensure_future(client.wait_failed())] = client
        if self._changed is not None:
            self._changed.set()

    def _unwatch(self, client: PooledEngine) -> None:
        for task in [task for task, watched in self._watched.items() if watched is client]:
            del self._watched[task]
            task.cancel()

    async def wait_failed(self) -> str:
        """Wait until one of the engines in use has failed for good and return the reason."""
        self._changed = asyncio.Event()
        while True:
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, *self._watched], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            for task in [task for task in self._watched if task.done()]:
                # An engine that was replaced has the name of its successor.
                if self._watched.pop(task) in self._clients.values():
                    return task.result()


async def _no_others(client: PooledEngine) -> None:
    """Return at once: there is only one front end."""
