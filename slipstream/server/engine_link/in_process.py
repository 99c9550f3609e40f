"""An engine in a thread of this process, for `slipstream.LLM` and tests.

The thread runs the same loop as the engine process, with a queue as its link. It sleeps on the
queue while there is no work. The outputs of a request go to the event loop that submitted it.
A server in another process can use the same engine (`connect_server`).
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable

from slipstream.engine.messages import (
    RECENT_STEPS,
    Cancel,
    EngineInfo,
    EngineStats,
    Shutdown,
    StepOutputs,
    StepRecord,
)
from slipstream.engine.request import GenerateRequest
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.mailbox import InFlightRequest, Mailboxes
from slipstream.server.engine_link.serve import Loop, describe, serve
from slipstream.server.engine_link.shared_link import (
    ConnectServer,
    DisconnectServer,
    SharedLink,
    own_first_id,
)


class InProcessEngine:
    def __init__(self, loop: Loop) -> None:
        self.info: EngineInfo | None = loop.info
        self.stats = loop.stats()
        self.last_steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.on_stats: Callable[[], None] | None = None
        self.failure: str | None = None
        self._mailboxes = Mailboxes(itertools.count(own_first_id()))
        self._link = SharedLink(self._take)
        self._draining = False
        # held to open a mailbox and to set `failure`: no mailbox opens after a failure
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self.failure is None and not self._draining

    @property
    def outstanding(self) -> int:
        return len(self._mailboxes)

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        if self._draining:
            raise EngineUnavailable("the server is shutting down")
        with self._lock:
            if self.failure is not None:
                raise EngineUnavailable(f"the engine is not running: {self.failure}")
            in_flight = self._mailboxes.open(request, self._cancel)
        self._link.put(in_flight.request)
        return in_flight

    def connect_server(self, sockets: list[str], on_end: Callable[[], None]) -> None:
        """Connect the front ends of a server, which bind these sockets.

        `on_end` is called on the engine's thread when the server disconnects. A server that was
        connected before is disconnected.
        """
        with self._lock:
            if self.failure is not None or self.info is None:
                raise EngineUnavailable(f"the engine is not running: {self.failure}")
            self._link.put(ConnectServer(self.info, sockets, on_end))

    def disconnect_server(self, sockets: list[str]) -> None:
        """Cancel the requests of a server that has ended, and close the links to it."""
        self._link.put(DisconnectServer(sockets))

    def begin_drain(self) -> None:
        self._draining = True

    async def wait_drained(self) -> None:
        await self._mailboxes.wait_empty()

    def close(self) -> None:
        """End the thread after its current step. Requests still in flight fail."""
        self._draining = True
        self._link.put(Shutdown())
        self._thread.join()

    def _cancel(self, request_id: int, reason: str) -> None:
        self._link.put(Cancel([request_id], reason))

    def _run(self, loop: Loop) -> None:
        try:
            serve(loop, self._link)
            reason = "it was closed"
        except Exception as error:
            traceback.print_exc()
            reason = describe(error)
        with self._lock:
            self.failure = reason
        self._on_event_loops(self._mailboxes.fail_all, f"the engine failed: {reason}")
        self._link.close(reason)
        loop.close()

    def _take(self, message: StepOutputs | EngineStats) -> None:
        """Pass the outputs of a step to the event loops that wait for them, or keep statistics.

        This is called on the engine's thread.
        """
        if isinstance(message, StepOutputs):
            self._on_event_loops(self._mailboxes.deliver, message)
            return
        self.stats = message
        self.last_steps.extend(message.recent_steps)
        if self.on_stats is not None:
            self.on_stats()

    def _on_event_loops(self, action: Callable[..., None], argument: StepOutputs | str) -> None:
        for event_loop in self._mailboxes.event_loops():
            try:
                event_loop.call_soon_threadsafe(action, argument, event_loop)
            except RuntimeError:  # the event loop is closed, so its requests have no reader
                self._link.put(Cancel(self._mailboxes.drop(event_loop)))
