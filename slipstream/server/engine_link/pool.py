"""The engine processes of a server, by the name of their engine model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.engine.messages import EngineInfo
from slipstream.repository.models import EngineModel
from slipstream.server.engine_link.client import EngineClient, Supervision

logger = logging.getLogger(__name__)

_TYPICAL_TOKENS = 1024  # prompt and answer of a typical chat


class EnginePool:
    """The engines that serve, load or drain. They are added and removed while the server runs."""

    def __init__(
        self, settings: Mapping[str, Any], supervision: Supervision, command: Sequence[str]
    ) -> None:
        self._settings = settings  # they override those of the repository
        self._supervision = supervision
        self._command = command
        # engines that serve, load, or have failed while serving
        self._clients: dict[str, EngineClient] = {}
        self._starting: dict[EngineClient, asyncio.Future[None]] = {}
        self._leaving: set[EngineClient] = set()
        self._watched: dict[asyncio.Task[str], str] = {}
        self._changed: asyncio.Event | None = None
        # called when an engine is added or removed
        self.on_change: Callable[[], None] = lambda: None

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
            model.engine_config.path, settings, self._supervision, self._command, model.name
        )

    def spawn(self, model: EngineModel) -> None:
        """Start the process before there is an event loop; `start` waits for it later."""
        client = self._clients[model.name] = self.create(model)
        client.spawn()

    def watch_spawned(self) -> None:
        """Watch the spawned processes while they load."""
        for client in self:
            self._starting[client] = asyncio.ensure_future(client.start())

    async def start(self, model: EngineModel) -> EngineClient:
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

    def adopt(self, name: str, client: EngineClient) -> EngineClient | None:
        """Make this the engine of that name. Return its predecessor, which must be released."""
        before = self._clients.get(name)
        if before is not None and before is not client:
            client.continue_counters_of(before)
        self._clients[name] = client
        self._watch(name, client)
        self.on_change()
        return before if before is not client else None

    def forget(self, name: str) -> EngineClient | None:
        client = self._clients.pop(name, None)
        self.on_change()
        return client

    def forget_if(self, name: str, client: EngineClient) -> None:
        """Forget the engine of that name if it is this one."""
        if self._clients.get(name) is client:
            self.forget(name)

    async def release(self, client: EngineClient, patience_seconds: float) -> None:
        """Wait for its requests, then end its process and free its memory."""
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
            client.info = None  # its process is gone
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
        """Wait until one of the engines in use has failed for good and return the reason."""
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


def memory_table(name: str, info: EngineInfo) -> list[str]:
    """Return the lines of a table that shows how an engine uses the memory of its device."""
    tokens = info.total_blocks * info.block_tokens
    longest = info.max_sequence_tokens if info.windowed else min(info.max_sequence_tokens, tokens)
    typical = min(_TYPICAL_TOKENS, longest)
    at_once = min(info.max_rows, tokens // typical)
    rows = [
        ("weights", info.weight_bytes, f"computed in {info.dtype}"),
        ("key-value cache", info.cache_bytes, f"{tokens} tokens"),
    ]
    if info.compressed_weight_bytes:
        use = "copies, read by steps of up to 32 tokens"
        rows.insert(1, ("12-bit weights", info.compressed_weight_bytes, use))
    if info.step_bytes:
        rows.append(("a full step", info.step_bytes, "activations"))
    if info.graph_bytes:
        rows.append(("captured steps", info.graph_bytes, "decode graphs"))
    lines = [f"{name} on {info.device}, loaded in {info.load_seconds:.1f} s:"]
    lines += [f"  {label:<16} {size / 2**20:>10.0f} MiB  {use}" for label, size, use in rows]
    lines.append(
        f"  {at_once} requests of {typical} tokens at once; {info.max_rows} of any length, up to "
        f"{longest} tokens each"
    )
    if longest < info.max_sequence_tokens:
        enough = -(-info.max_sequence_tokens // info.block_tokens) * info.block_tokens
        lines.append(
            f"  the model takes sequences of {info.max_sequence_tokens} tokens; "
            f"max_tokens_in_paged_kv_cache {enough} would hold one"
        )
    return lines
