"""What an engine's loop does while it has no work."""

from slipstream.engine.messages import EngineStats, Shutdown
from slipstream.server.engine_link.serve import IDLE_SECONDS, serve


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


class ScriptedLink:
    """Says of each wait whether a message came. The last message ends the loop."""

    def __init__(self, waits: list[bool]) -> None:
        self._waits = waits
        self.waited: list[float | None] = []

    def send(self, message) -> None:
        pass

    def wait(self, seconds: float | None) -> bool:
        self.waited.append(seconds)
        return self._waits.pop(0)

    def receive_waiting(self) -> list[Shutdown]:
        return [] if self._waits else [Shutdown()]


def test_an_engine_that_is_idle_for_a_moment_is_not_checked():
    loop = IdleLoop()
    link = ScriptedLink([True, True, True])
    serve(loop, link)
    assert loop.checks == 0
    assert link.waited == [IDLE_SECONDS] * 3


def test_an_idle_engine_is_checked_and_then_sleeps_until_a_message_comes():
    loop = IdleLoop()
    link = ScriptedLink([False, True])
    serve(loop, link)
    assert loop.checks == 1
    assert link.waited == [IDLE_SECONDS, None]


def test_the_next_check_comes_no_sooner_than_a_second_later():
    loop = IdleLoop()
    link = ScriptedLink([False, True, True])
    serve(loop, link)
    assert loop.checks == 1
    assert IDLE_SECONDS <= link.waited[2] <= 1.0
