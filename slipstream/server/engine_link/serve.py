"""The loop of an engine's process: receive the waiting messages, run one step, send its outputs.

The in-process engine runs the same loop on a thread, over a queue instead of a socket.
"""

from __future__ import annotations

import math
import time
from typing import Protocol, cast

from slipstream.engine.messages import (
    Cancel,
    EngineInfo,
    EngineStats,
    Shutdown,
    StatsPeriod,
    StepOutputs,
)
from slipstream.engine.request import FinishReason, GenerateRequest
from slipstream.server.engine_link.link import FromEngine, ToLoop

STATS_SECONDS = 0.1
INTEGRITY_SECONDS = 1.0
# A check delays a request that arrives meanwhile, by 10 ms with a large cache. Between the requests
# of a client that sends one after the other, an engine is idle for less than this.
IDLE_SECONDS = 0.2


class Loop(Protocol):
    """The interface of `engine.loop.EngineLoop`."""

    info: EngineInfo

    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_ids: list[int], reason: FinishReason = "cancelled") -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepOutputs | None: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...
    def close(self) -> None: ...


class LoopLink(Protocol):
    """The engine's side of a link, to another process or to another thread."""

    @property
    def heartbeat_seconds(self) -> float:
        """The longest time without a message while there is no work."""

    def send(self, message: FromEngine) -> None: ...
    def wait(self, seconds: float | None) -> bool: ...
    def receive_waiting(self) -> list[ToLoop]: ...


def serve(loop: Loop, link: LoopLink) -> None:
    """Run until a Shutdown message: apply the waiting messages, run a step, send its outputs."""
    stats_seconds = STATS_SECONDS
    next_stats = next_check = 0.0
    while True:
        if not loop.has_work():
            next_check = _wait_for_work(loop, link, next_check)
        for message in link.receive_waiting():
            if isinstance(message, Shutdown):
                return
            if isinstance(message, StatsPeriod):
                stats_seconds = message.seconds
                next_stats = 0.0
            else:
                _apply(loop, message)
        outputs = loop.step()
        if outputs is not None:
            link.send(outputs)
        if time.monotonic() >= next_stats:
            link.send(loop.stats())
            next_stats = time.monotonic() + stats_seconds


def _apply(loop: Loop, message: GenerateRequest | Cancel) -> None:
    if isinstance(message, GenerateRequest):
        loop.submit(message)
    else:
        loop.cancel(message.request_ids, cast(FinishReason, message.reason))


def _wait_for_work(loop: Loop, link: LoopLink, next_check: float) -> float:
    """Sleep until there is a message. If none comes for a while, check the engine's integrity, at
    most once a second.

    The statistics are sent regularly meanwhile: a server that gets no message reports the engine as
    not ready. Returns the time of the next check.
    """
    check_time = max(time.monotonic() + IDLE_SECONDS, next_check)
    while True:
        link.send(loop.stats())
        seconds = min(link.heartbeat_seconds, max(0.0, check_time - time.monotonic()))
        if link.wait(None if seconds == math.inf else seconds):
            return next_check
        if time.monotonic() >= check_time:
            loop.check_integrity()
            next_check = time.monotonic() + INTEGRITY_SECONDS
            check_time = math.inf


def describe(error: Exception) -> str:
    """Return one line that a client may see: the kind of error and the first line of its text."""
    text = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
