"""The state that health probes report: `live` and `ready`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slipstream.server.engine_link.engine import Engine


class ServerState:
    """`engines` is read at each call, so it may be a collection that changes."""

    def __init__(
        self, engines: Iterable[Engine], models_ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._engines = engines
        self.models_ready = models_ready  # whether every model that should be loaded serves
        self.draining = False
        # the requests that other front ends have in flight
        self.outstanding_elsewhere: Callable[[], int] = lambda: 0

    @property
    def live(self) -> bool:
        """True: a server whose event loop answers is live."""
        return True

    @property
    def ready(self) -> bool:
        """Return whether the server accepts new work and every engine makes progress."""
        return (
            not self.draining
            and self.models_ready()
            and all(engine.ready for engine in self._engines)
        )

    @property
    def outstanding(self) -> int:
        """The number of requests in flight in all engines."""
        own = sum(engine.outstanding for engine in self._engines)
        return own + self.outstanding_elsewhere()
