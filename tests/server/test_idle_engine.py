"""What an engine's loop does while it has no work."""

import pytest

from slipstream.engine.messages import EngineStats, Shutdown
from slipstream.server.engine_link import serve as serving


class IdleLoop:
    """An engine without work."""

    info = None

    def __init__(self) -> None:
        self.checks = 0

    def has_work(self) -> bool:
        return False

    def step(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats()

    def check_integrity(self) -> None:
        self.checks += 1


class Clock:
    """A clock that the link moves, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class ScriptedLink:
    """Says of each wait whether a message came. The last message ends the loop."""

    heartbeat_seconds = 0.25

    def __init__(self, clock: Clock, waits: list[bool]) -> None:
        self._clock = clock
        self._waits = waits
        self.waited: list[float] = []
        self.sent = 0

    def send(self, message) -> None:
        self.sent += 1

    def wait(self, seconds: float | None) -> bool:
        assert seconds is not None
        self.waited.append(round(seconds, 6))
        if not self._waits[0]:
            self._clock.now += seconds
        return self._waits.pop(0)

    def receive_waiting(self) -> list[Shutdown]:
        return [] if self._waits else [Shutdown()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving, "time", clock)
    return clock


def test_an_engine_that_is_idle_for_a_moment_is_not_checked(clock: Clock) -> None:
    loop = IdleLoop()
    link = ScriptedLink(clock, [True, True, True])
    serving.serve(loop, link)
    assert loop.checks == 0
    assert link.waited == [0.2] * 3


def test_an_idle_engine_is_checked_once_and_then_sends_heartbeats(clock: Clock) -> None:
    loop = IdleLoop()
    link = ScriptedLink(clock, [False] * 9 + [True])
    serving.serve(loop, link)
    assert loop.checks == 1
    assert link.waited == [0.2] + [0.25] * 9
    assert link.sent == 10


def test_the_next_check_comes_no_sooner_than_a_second_later(clock: Clock) -> None:
    loop = IdleLoop()
    link = ScriptedLink(clock, [False, True, False, False, False, True])
    serving.serve(loop, link)
    assert (loop.checks, clock.now) == (1, 100.95)
    link = ScriptedLink(clock, [False, True, False, False, False, False, True])
    serving.serve(loop, link)
    assert loop.checks == 3
    assert link.waited[2:] == [0.25, 0.25, 0.25, 0.25, 0.25]
