"""Several engines of one model behind one `Engine`: each request goes to one of them.

    engine = Replicas([EngineClient(...), EngineClient(...)])
    engine.spawn()
    await engine.start()           # returns when all serve
    async for output in engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling)): ...

A replica that fails loses its own requests only. Its client restarts it while the others serve.
`routing.py` has the rule that chooses. What was sent where is known per front end: a secondary one
has a `LinkedReplicas` of its own, over links to the same processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.engine.messages import EngineInfo, EngineStats
from slipstream.engine.request import GenerateRequest
from slipstream.server.engine_link.client import EngineClient, EngineStartFailed
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.linked import LinkedEngine
from slipstream.server.engine_link.mailbox import InFlightRequest
from slipstream.server.engine_link.past_totals import PastTotals, Predecessor
from slipstream.server.engine_link.routing import Policy, Router, block_hashes, load, root_hash

logger = logging.getLogger(__name__)

_MAX_ADAPTERS = 100_000  # adapters whose replicas are remembered
_USUAL_STEP_TOKENS = 512  # of an engine that does not say


class Replica(Protocol):
    """One engine as the chooser sees it: `EngineClient` or `LinkedEngine`."""

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def outstanding(self) -> int: ...

    @property
    def processes(self) -> int: ...

    def has(self, request_id: int) -> bool: ...
    def submit(self, request: GenerateRequest) -> InFlightRequest: ...


class ReplicaChooser:
    """Submits requests to replicas, and remembers what each of them was sent."""

    def __init__(self, replicas: Sequence[Replica], policy: Policy = "prefix") -> None:
        # returns the requests that other front ends have in flight at a replica
        self.count_elsewhere: Callable[[int], int] = lambda index: 0
        self._replicas = replicas
        self._policy = policy
        self._router = Router(len(replicas), 0, policy)
        self._processes = [0] * len(replicas)  # processes that each replica has had
        self._info: EngineInfo | None = None
        # prompt tokens that each replica has not computed, of requests without output
        self._uncomputed = [0] * len(replicas)
        # number of an adapter → replicas that have loaded it, one bit each
        self._adapters: OrderedDict[int, int] = OrderedDict()

    @property
    def info(self) -> EngineInfo | None:
        """The sizes of all replicas together; None before one of them has served."""
        self._notice_restarts()
        return self._info

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        """Submit a request to the replica that suits it best among those that accept it."""
        self._notice_restarts()
        chain = self._chain(request)
        among = self._candidates(request)
        refusals: list[str] = []
        while among:
            index = self._router.choose(chain, self._loads(), among)
            try:
                in_flight = self._replicas[index].submit(request)
            except EngineUnavailable as error:
                refusals.append(str(error))
                among.remove(index)
            else:
                self._note(index, in_flight, chain)
                return in_flight
        raise EngineUnavailable("; ".join(dict.fromkeys(refusals)))

    def _notice_restarts(self) -> None:
        """Forget what the former process of a replica had."""
        for index, replica in enumerate(self._replicas):
            if replica.processes != self._processes[index]:
                self._processes[index] = replica.processes
                self._router.forget(index)
                for number in list(self._adapters):
                    self._adapters[number] &= ~(1 << index)
                self._read_sizes()

    def _read_sizes(self) -> None:
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        self._info = EngineInfo.of_replicas(infos)
        self._router.most_blocks = self._info.total_blocks
        self._router.block_load = self._info.block_tokens / self._step_tokens
        if self._policy == "prefix" and not self._info.reuse:
            self._router.policy = "load"  # no replica keeps blocks

    def _chain(self, request: GenerateRequest) -> list[int]:
        if self._info is None or self._router.policy != "prefix":
            return []
        root = root_hash(request.adapter, request.cache_salt)
        return block_hashes(request.prompt, self._info.block_tokens, root)

    def _candidates(self, request: GenerateRequest) -> list[int]:
        """Return the replicas that may get a request."""
        everywhere = range(len(self._replicas))
        leader = request.shares_prompt_with
        if leader is not None:
            # the blocks of its prompt are where the first sequence is
            found = [index for index in everywhere if self._replicas[index].has(leader)]
            if found:
                return found
        ready = [index for index in everywhere if self._replicas[index].ready]
        if request.adapter and request.adapter_source is None:
            # Only the replicas that were sent the adapter have it. Others answer that it is not in
            # the cache, so that the client sends it again.
            mask = self._adapters.get(request.adapter, 0)
            found = [index for index in ready if mask >> index & 1]
            if found:
                return found
        # one that does not respond is better than none
        return ready or list(everywhere)

    def _loads(self) -> list[float]:
        return [
            load(
                replica.outstanding + self.count_elsewhere(index),
                self._uncomputed[index],
                self._step_tokens,
            )
            for index, replica in enumerate(self._replicas)
        ]

    def _note(self, index: int, in_flight: InFlightRequest, chain: list[int]) -> None:
        request = in_flight.request
        cached = self._router.matched(chain)[index] * self._block_tokens
        self._router.sent(index, chain)
        if request.adapter_source is not None:
            self._adapters[request.adapter] = self._adapters.get(request.adapter, 0) | 1 << index
            self._adapters.move_to_end(request.adapter)
            if len(self._adapters) > _MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        in_flight.observer = _Progress(self, index, request, chain, cached)

    @property
    def _step_tokens(self) -> int:
        return (0 if self._info is None else self._info.step_tokens) or _USUAL_STEP_TOKENS

    @property
    def _block_tokens(self) -> int:
        return 0 if self._info is None else self._info.block_tokens

    def add_uncomputed(self, index: int, tokens: int) -> None:
        self._uncomputed[index] += tokens

    def note_output(
        self, index: int, request: GenerateRequest, chain: list[int], output: list[int]
    ) -> None:
        """Note that a replica has the blocks of a request's output, which the next turn of a
        conversation begins with.
        """
        if self._router.policy != "prefix" or not output:
            return
        size = self._block_tokens
        parent = chain[-1] if chain else root_hash(request.adapter, request.cache_salt)
        rest = [*request.prompt[len(chain) * size :], *output]
        self._router.sent(index, [*chain, *block_hashes(rest, size, parent)])


class _Progress:
    """Observes the outputs of one request: its prompt is computed when the first one comes."""

    __slots__ = ("_chain", "_chooser", "_index", "_output", "_request", "_uncomputed")

    def __init__(
        self,
        chooser: ReplicaChooser,
        index: int,
        request: GenerateRequest,
        chain: list[int],
        cached_tokens: int,
    ) -> None:
        self._chooser = chooser
        self._index = index
        self._request = request
        self._chain = chain
        self._output: list[int] = []
        self._uncomputed = len(request.prompt) - cached_tokens
        chooser.add_uncomputed(index, self._uncomputed)

    def __call__(self, tokens: Sequence[int], last: bool) -> None:
        if self._uncomputed:
            self._chooser.add_uncomputed(self._index, -self._uncomputed)
            self._uncomputed = 0
        self._output += tokens
        if last and not self._request.sampling.beams:
            self._chooser.note_output(self._index, self._request, self._chain, self._output)


class Replicas:
    """The replicas of one model, in the server's primary process. It starts and watches them."""

    def __init__(self, clients: Sequence[EngineClient], policy: Policy = "prefix") -> None:
        self.clients = tuple(clients)
        self.on_stats: Callable[[], None] | None = None
        self._chooser = ReplicaChooser(self.clients, policy)
        self._past = PastTotals()
        self._serves = False  # all have started, and none has been stopped for good
        self._starting: list[asyncio.Task[None]] = []
        for client in self.clients:
            client.on_stats = self._pass_stats

    # -- the interface of `Engine`

    @property
    def info(self) -> EngineInfo | None:
        return self._chooser.info if self._serves else None

    @property
    def stats(self) -> EngineStats:
        """The sums of all replicas."""
        each = [client.stats for client in self.clients]
        return self._past.added_to(EngineStats.of_replicas(each))

    @property
    def ready(self) -> bool:
        """Return whether a replica serves, accepts new work and makes progress."""
        return any(client.ready for client in self.clients)

    @property
    def outstanding(self) -> int:
        return sum(client.outstanding for client in self.clients)

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        return self._chooser.submit(request)

    def _pass_stats(self) -> None:
        if self.on_stats is not None:
            self.on_stats()

    # -- what the pool does with an engine

    def count_with(self, count_elsewhere: Callable[[EngineClient], int]) -> None:
        """Count the requests of other front ends as load, too."""
        self._chooser.count_elsewhere = lambda index: count_elsewhere(self.clients[index])

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

    def spawn(self) -> None:
        """Start the processes. Call this from the main thread, as `EngineClient.spawn`."""
        for client in self.clients:
            client.spawn()

    async def start(self) -> None:
        """Return when all replicas serve. EngineStartFailed says why one of them does not."""
        self._starting = [asyncio.ensure_future(client.start()) for client in self.clients]
        await asyncio.wait(self._starting, return_when=asyncio.FIRST_EXCEPTION)
        for index, starting in enumerate(self._starting):
            if starting.done() and (error := starting.exception()) is not None:
                raise EngineStartFailed(f"replica {index}: {error}") from error
        self._serves = True

    async def wait_failed(self) -> str:
        """Wait until all replicas have failed for good and return the reason of the last one."""
        waiting = {
            asyncio.ensure_future(client.wait_failed()): index
            for index, client in enumerate(self.clients)
        }
        left = set(waiting)
        reason = ""
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for failed in done:
                    reason = failed.result()
                    logger.error(
                        "replica %d failed for good, %d of %d go on: %s",
                        waiting[failed],
                        len(left),
                        len(waiting),
                        reason,
                    )
        finally:
            for task in left:
                task.cancel()
        return reason

    def begin_drain(self) -> None:
        for client in self.clients:
            client.begin_drain()

    async def wait_drained(self) -> None:
        await asyncio.gather(*(client.wait_drained() for client in self.clients))

    async def stop(self, patience_seconds: float = 5.0) -> None:
        """End the processes. Requests still in flight fail."""
        await asyncio.gather(*(client.stop(patience_seconds) for client in self.clients))
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)

    def mark_ended(self) -> None:
        """Note that the processes have ended, so that the statistics are final."""
        self._serves = False

    def kill(self) -> None:
        """End the processes now, without an event loop."""
        for client in self.clients:
            client.kill()

    def abandon(self) -> None:
        """Kill the processes and remove their files, from any thread, before this process ends."""
        for client in self.clients:
            client.abandon()


class LinkedReplicas:
    """The replicas of one model, in a secondary front end. The primary one watches them."""

    def __init__(
        self, engines: Sequence[LinkedEngine], count_elsewhere: Callable[[int], int]
    ) -> None:
        """`count_elsewhere` returns the requests of other front ends at a replica."""
        self.stats = EngineStats()  # the primary front end has the statistics
        self.on_stats: Callable[[], None] | None = None
        self._engines = engines
        self._chooser = ReplicaChooser(engines)
        self._chooser.count_elsewhere = count_elsewhere

    @property
    def info(self) -> EngineInfo | None:
        return self._chooser.info

    @property
    def ready(self) -> bool:
        return any(engine.ready for engine in self._engines)

    @property
    def outstanding(self) -> int:
        return sum(engine.outstanding for engine in self._engines)

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        return self._chooser.submit(request)
