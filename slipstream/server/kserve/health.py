"""What the health probes ask: `live` is that the event loop answers, `ready` is that new work is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Engine(Protocol):
    @property
    def ready(self) -> bool: ...


class ServerState:
    """`engines` is looked at anew each time, so it may be a collection that changes."""

    def __init__(
        self, engines: Iterable[Engine], models_ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._engines = engines
        self.models_ready = models_ready  # whether every model that was asked for serves
        self.draining = False

    @property
    def live(self) -> bool:
        return True  # whoever can ask has the answer

    @property
    def ready(self) -> bool:
        """Every engine has warmed up, makes progress with what it has, and the server is not on its
        way out.
        """
        return (
            not self.draining
            and self.models_ready()
            and all(engine.ready for engine in self._engines)
        )
