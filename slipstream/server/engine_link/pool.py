"""The engine processes of a server, by the name of the engine model: they come and go while the
server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.repository.models import EngineModel
from slipstream.server.engine_link.client import EngineClient, Supervision

logger = logging.getLogger(__name__)


class EnginePool:
    def __init__(
        self, settings: Mapping[str, Any], supervision: Supervision, command: Sequence[str]
    ) -> None:
        self._settings = settings  # win over what the repository says
        self._supervision = supervision
        self._command = command
        # those that serve, load, or failed while serving
        self._clients: dict[str, EngineClient] = {}
        self._starting: dict[EngineClient, asyncio.Future[None]] = {}
        self._leaving: set[EngineClient] = set()
        self._watched: dict[asyncio.Task[str], str] = {}
        self._changed: asyncio.Event | None = None
        self.on_change: Callable[[], None] = lambda: None  # for whoever lists the engines elsewhere

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(list(self._clients.values()))

    def items(self) -> list[tuple[str, EngineClient]]:
        return list(self._clients.items())

    @property
    def outstanding(self) -> int:
        return sum(client.outstanding for client in (*self, *self._leaving))

    def create(self, model: EngineModel) -> EngineClient:
        settings = replace(model.settings, **self._settings)
        return EngineClient(
            model.engine.path, settings, self._supervision, self._command, model.name
        )

    def spawn(self, model: EngineModel) -> None:
        """Start the process before there is an event loop; `start` waits for it later."""
        client = self._clients[model.name] = self.create(model)
        client.spawn()

    def attend(self) -> None:
        """From here on, the processes that were spawned are watched while they load."""
        for client in self:
            self._starting[client] = asyncio.ensure_future(client.start())

    async def start(self, model: EngineModel) -> EngineClient:
        """An engine that serves; one that was spawned already is only waited for. EngineStartFailed
        says why not.
        """
        spawned = self._clients.get(model.name)
        client = (
            spawned if spawned is not None and spawned in self._starting else self.create(model)
        )
        try:
            await (self._starting.pop(client, None) or client.start())
        except BaseException:
            if self._clients.get(model.name) is client:
                del self._clients[model.name]
            self._leaving.add(client)  # where `kill` finds it, should there be no time to stop it
            await client.stop()
            self._leaving.discard(client)
            raise
        return client

    def adopt(self, name: str, client: EngineClient) -> EngineClient | None:
        """From now on this is the engine of that name. The one before it is returned, to be
        released.
        """
        before = self._clients.get(name)
        if before is not None and before is not client:
            client.count_on_from(before)
        self._clients[name] = client
        self._watch(name, client)
        self.on_change()
        return before if before is not client else None

    def forget(self, name: str) -> EngineClient | None:
        client = self._clients.pop(name, None)
        self.on_change()
        return client

    def forget_if(self, name: str, client: EngineClient) -> None:
        """Forget the engine of that name where it is this one."""
        if self._clients.get(name) is client:
            self.forget(name)

    async def release(self, client: EngineClient, patience_seconds: float) -> None:
        """Let it finish what it has, then end its process and free its memory."""
        self._leaving.add(client)
        client.begin_drain()
        try:
            await asyncio.wait_for(client.wait_drained(), patience_seconds)
        except TimeoutError:
            logger.warning(
                "%d requests of an unloaded model still run and are given up", client.outstanding
            )
        finally:
            await client.stop()
            client.info = None  # nothing is known any more of what is not there
            self._leaving.discard(client)

    def begin_drain(self) -> None:
        for client in self:
            client.begin_drain()

    async def wait_drained(self) -> None:
        await asyncio.gather(*(client.wait_drained() for client in (*self, *self._leaving)))

    async def stop(self) -> None:
        for task in self._watched:
            task.cancel()
        for start in self._starting.values():
            start.cancel()
        await asyncio.gather(*(client.stop() for client in (*self, *self._leaving)))

    def kill(self) -> None:
        for client in (*self, *self._leaving):
            client.kill()

    def _watch(self, name: str, client: EngineClient) -> None:
        task = asyncio.ensure_future(client.wait_failed())
        self._watched[task] = name
        if self._changed is not None:
            self._changed.set()

    async def wait_failed(self) -> str:
        """Returns, with the reason, when one of the engines in use is down for good."""
        self._changed = asyncio.Event()
        while True:
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, *self._watched], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            for task in [task for task in self._watched if task.done()]:
                name = self._watched.pop(task)
                if name in self._clients:
                    return task.result()
