"""The following ranks of an engine whose leading rank is this process, for `slipstream.LLM`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.child import RankProcess
from slipstream.server.engine_link.link import RankFiles, StartOrder

_REAP_SECONDS = 5.0


class FollowerProcesses:
    """Starts the followers, and knows how the first of them ended."""

    def __init__(
        self, command: Sequence[str], engine_folder: str, settings: EngineSettings
    ) -> None:
        ranks = settings.ranks or 1
        self._files = RankFiles(ranks)
        self.place = self._files.place(0)  # of this process
        self._changed = threading.Condition()
        self._failure = ""
        self._leaving = False
        self._processes: list[RankProcess] = []
        self._threads: list[threading.Thread] = []
        for rank in range(1, ranks):
            place = self._files.place(rank)
            order = StartOrder([], engine_folder, settings.to_json(), os.getpid(), place)
            self._spawn(command, order)

    def _spawn(self, command: Sequence[str], order: StartOrder) -> None:
        """Start a process in a thread that waits for its end: the kernel kills the process when
        the thread that started it ends.
        """
        started = threading.Event()
        problems: list[OSError] = []

        def run() -> None:
            try:
                process = RankProcess(command, order)
            except OSError as error:
                problems.append(error)
                started.set()
                return
            self._processes.append(process)
            started.set()
            self._note_exit(process.describe_exit(process.wait()))

        thread = threading.Thread(target=run, name=f"rank {len(self._threads) + 1}", daemon=True)
        thread.start()
        self._threads.append(thread)
        started.wait()
        if problems:
            self.kill()
            raise problems[0]

    def _note_exit(self, how: str) -> None:
        """Keep the first exit, which is the cause of the others."""
        with self._changed:
            if not self._leaving and not self._failure:
                self._failure = how
            self._changed.notify_all()

    @property
    def process_ids(self) -> list[int]:
        return [process.process_id for process in self._processes]

    def remove_files(self) -> None:
        """Remove the files over which the ranks have met."""
        self._files.remove()

    def find_failure(self, seconds: float = 0.0) -> str:
        """Return how the first follower ended, if one has ended or ends within this time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failure), seconds)
            return self._failure

    def close(self, seconds: float = _REAP_SECONDS) -> None:
        """Wait for the followers, which must have the order to leave; kill those that remain."""
        self._leaving = True
        for thread in self._threads:
            thread.join(seconds)
        self.kill()

    def kill(self) -> None:
        self._leaving = True
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join(_REAP_SECONDS)
        self._files.remove()
