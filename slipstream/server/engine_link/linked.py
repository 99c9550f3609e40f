"""The engine of a secondary front end: a link to an engine process that the primary one started.

    engine = LinkedEngine(index)
    engine.attach(path)            # the engine serves; the path comes from EngineClient.link_path
    await engine.wait_serving()    # it has sent its EngineInfo over the link
    async for output in engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling)): ...
    engine.lose(reason)            # the process has ended; `attach` comes again after its restart

The primary front end alone watches the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.request import GenerateRequest
from slipstream.server.engine_link.client import request_ids
from slipstream.server.engine_link.link import FromEngine, LinkError, ServerEnd
from slipstream.server.engine_link.mailbox import InFlightRequest, LinkedRequests

logger = logging.getLogger(__name__)


class LinkedEngine:
    """The engine of a secondary front end. It has the interface of `engine.Engine`."""

    def __init__(self, index: int, ids: Iterator[int] | None = None) -> None:
        """index: number of this front end, from 1 on
        ids: ids of requests, which replicas share; None: those of one engine
        """
        self.info: EngineInfo | None = None  # of the latest process
        self.stats = EngineStats()  # the primary front end has the engine's statistics
        self.on_stats: Callable[[], None] | None = None
        self._requests = LinkedRequests(ids or request_ids(index))
        self._link: ServerEnd | None = None
        self._served = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._requests.serving and not self._requests.draining

    @property
    def failure(self) -> str | None:
        """Return why it does not serve; None while it serves or loads for the first time."""
        return self._requests.failure

    @property
    def outstanding(self) -> int:
        return self._requests.outstanding

    @property
    def processes(self) -> int:
        """The number of processes that have served. A new one has an empty cache."""
        return self._requests.processes

    def has(self, request_id: int) -> bool:
        """Return whether this front end has this request in flight here."""
        return self._requests.has(request_id)

    def watch_outstanding(self, on_count: Callable[[int], None]) -> None:
        """Call this with the number of requests in flight whenever it changes."""
        self._requests.watch_outstanding(on_count)

    def attach(self, path: str) -> None:
        """Wait for the engine at this path. `ready` is set when its first message comes."""
        self._close_link()
        try:
            self._link = ServerEnd(Path(path))
        except LinkError as error:
            # the process has ended meanwhile, and its socket with it; `lose` follows
            logger.info("the engine is not reached: %s", error)
            return
        self._link.attach(self._on_message)

    async def wait_serving(self) -> None:
        await self._served.wait()

    def lose(self, reason: str) -> None:
        """Fail all requests in flight, after the outputs that the process has sent before."""
        if self._link is not None:
            self._link.receive_waiting()
        self._requests.lose(reason)
        self._close_link()

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        return self._requests.submit(request)

    def begin_drain(self) -> None:
        """Refuse new requests and continue with those in flight."""
        self._requests.draining = True

    async def wait_drained(self) -> None:
        await self._requests.wait_drained()

    def close(self) -> None:
        """Close the link. Requests still in flight fail."""
        self._requests.end()
        self._close_link()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._requests.deliver(message)
        elif isinstance(message, EngineInfo):
            assert self._link is not None
            self._link.unlink_socket()
            self.info = message
            self._requests.serve(self._link)
            self._served.set()

    def _close_link(self) -> None:
        self._served.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
