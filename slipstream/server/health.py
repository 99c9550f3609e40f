"""What the health probes ask: `live` is that the event loop answers, `ready` is that new work is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Engine(Protocol):
    @property
    def ready(self) -> bool: ...


class ServerState:
    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = tuple(engines)
        self.draining = False

    @property
    def live(self) -> bool:
        return True  # whoever can ask has the answer

    @property
    def ready(self) -> bool:
        """Every engine has warmed up, makes progress with what it has, and the server is not on its way out."""
        return not self.draining and all(engine.ready for engine in self._engines)
