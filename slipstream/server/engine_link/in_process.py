"""The engine in a thread of this process, with the surface of `EngineClient`: for `slipstream.LLM`
and tests.

The thread runs the very loop the engine process runs, over a link made of a queue. It sleeps on the
queue while there is nothing to do. Each request's deltas go to the event loop that submitted it.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Unpack

from slipstream.engine.messages import Cancel, EngineInfo, EngineStats, Shutdown, StepOutputs
from slipstream.engine.request import SamplingParams
from slipstream.server.engine_link.link import FromEngine, ToEngine
from slipstream.server.engine_link.mailbox import EngineUnavailable, InFlightRequest, Mailboxes
from slipstream.server.engine_link.serve import Loop, describe, serve
from slipstream.server.engine_link.submission import Submission, engine_request


class InProcessEngine:
    def __init__(self, loop: Loop) -> None:
        self.info: EngineInfo | None = loop.info
        self.stats = loop.stats()
        self.failure: str | None = None
        self._mailboxes = Mailboxes()
        self._link = _QueueLink(self)
        self._draining = False
        # closed for good when `failure` is set: nobody slips in behind it
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self.failure is None and not self._draining

    @property
    def outstanding(self) -> int:
        return len(self._mailboxes)

    def submit(
        self, prompt: list[int], sampling: SamplingParams, **more: Unpack[Submission]
    ) -> InFlightRequest:
        if self._draining:
            raise EngineUnavailable("the server is shutting down")
        with self._door:
            if self.failure is not None:
                raise EngineUnavailable(f"the engine is not running: {self.failure}")
            generation = self._mailboxes.open(sampling, self._cancel)
        self._link.put(engine_request(generation.request_id, prompt, sampling, more))
        return generation

    def begin_drain(self) -> None:
        self._draining = True

    async def wait_drained(self) -> None:
        await self._mailboxes.wait_empty()

    def close(self) -> None:
        """End the thread after the step it is in. Requests still in flight fail."""
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
        with self._door:
            self.failure = reason
        self._on_event_loops(self._mailboxes.fail_all, f"the engine failed: {reason}")

    def hand_over(self, outputs: StepOutputs) -> None:
        """Called on the engine's thread: pass a step's news to the event loops that wait for it."""
        self._on_event_loops(self._mailboxes.deliver, outputs)

    def _on_event_loops(self, action: Callable[..., None], argument: StepOutputs | str) -> None:
        for event_loop in self._mailboxes.event_loops():
            try:
                event_loop.call_soon_threadsafe(action, argument, event_loop)
            except RuntimeError:  # that event loop is closed: its requests have no reader any more
                self._link.put(Cancel(self._mailboxes.drop(event_loop)))


class _QueueLink:
    """The engine's side of a link inside one process."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._taken: list[ToEngine] = []  # by `wait`, and not handed out yet

    def put(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._engine.hand_over(message)
        elif isinstance(message, EngineStats):
            self._engine.stats = message

    def wait(self, seconds: float | None) -> bool:
        if not self._taken:
            try:
                self._taken.append(self._inbox.get(timeout=seconds))
            except queue.Empty:
                return False
        return True

    def receive_waiting(self) -> list[ToEngine]:
        messages, self._taken = self._taken, []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages
