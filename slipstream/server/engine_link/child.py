"""The processes of one engine, seen from the server: their links, their output and their exit.

An engine has one process for each rank. The link leads to rank 0. The first process that ends ends
the engine: the others are killed, because they would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

import slipstream
from slipstream.engine.messages import DropFrontEnd
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.cluster.engine_ranks import EngineRanks, RemoteEngine
from slipstream.server.engine_link.cluster.key import CLUSTER_KEY_VARIABLE
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.cluster.remote import RemoteRank
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    EngineFailed,
    FromEngine,
    RankFiles,
    ServerEnd,
    StartOrder,
    describe_exit,
    new_socket_path,
    remove_socket,
)
from slipstream.server.engine_link.silence import EngineState
from slipstream.server.log.capture import Relay
from slipstream.server.log.output import HANDLER
from slipstream.server.log.process_state import ProcessState, read_state

logger = logging.getLogger(__name__)

# -P: a file in the working directory must not take the place of a library.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "slipstream.engine_worker.process")
API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
ADMIN_KEY_VARIABLE = "SLIPSTREAM_ADMIN_KEY"
_REASON_SECONDS = 1.0  # longest wait for the reason that the process sent before its exit
# longest wait for the rest of its output, in case another process holds the pipe open
_OUTPUT_SECONDS = 0.5
_REAP_SECONDS = 5.0  # longest wait for the end of a killed process


class RankProcess:
    """One process of an engine."""

    def __init__(
        self,
        command: Sequence[str],
        order: StartOrder,
        name: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`name`: name of the engine model in the log. `variables`: for its environment."""
        # On a terminal the process writes its lines itself. Elsewhere its output is captured and
        # logged.
        log = HANDLER.settings
        terminal = sys.stderr.isatty() and log.format != "json" and not log.file
        place = order.place
        # the rank in messages; empty if it is the only one
        self.label = "" if place is None else f"rank {place.rank}: "
        self.reason = ""  # why it ended comes over its link
        listener = None if place is None or place.local is None else place.local.listener
        self._process = subprocess.Popen(
            [*command, msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=None if terminal else subprocess.PIPE,
            stderr=None if terminal else subprocess.STDOUT,
            env=child_environment() | dict(variables or {}),
            pass_fds=() if listener is None else (listener,),
            start_new_session=True,  # Ctrl-C in the terminal must reach only the server
        )
        self._relay: Relay | None = None
        if self._process.stdout is not None:
            with self._process.stdout as output:
                follows = place is not None and place.rank > 0
                self._relay = Relay(
                    os.dup(output.fileno()),
                    self._process.pid,
                    logging.WARNING,
                    name,
                    self.label if follows else "",
                )

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def state(self) -> ProcessState:
        return read_state(self._process.pid)

    def wait(self) -> int:
        """Wait for the end of the process and of its output; return the exit code."""
        code = self._process.wait()
        self.finish_output()  # the last lines of the process come before what the exit causes
        return code

    def show_stacks(self) -> None:
        """Have the process write the stacks of its threads, even if it is stopped or hangs."""
        # These do nothing once the process has been waited for.
        self._process.send_signal(signal.SIGUSR1)
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> None:
        """Wait for the end of a killed process."""
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("engine process %d was killed but has not ended", self._process.pid)
        self.finish_output()

    def finish_output(self) -> None:
        if self._relay is not None:
            self._relay.finish(_OUTPUT_SECONDS)

    def describe_exit(self, code: int) -> str:
        return f"{self.label}{describe_exit(code)}"


class EngineChild:
    def __init__(
        self,
        command: Sequence[str],
        engine_folder: str,
        settings: EngineSettings,
        name: str = "",
        frontends: int = 1,
        hosts: RankHosts | None = None,
        process: int = 0,
    ) -> None:
        """name: name of the engine model in the log
        frontends: processes of the server
        hosts: of the ranks on other machines; None: all ranks are on this one
        process: of the launcher, if it is another one that starts all ranks
        """
        ranks = settings.ranks or 1
        self.link = ServerEnd()
        # one socket per front end; this one, the primary, has the first
        self._paths = [self.link.path, *(new_socket_path() for _ in range(frontends - 1))]
        # a link to each following rank on this machine, for the reason of its exit
        self._follower_links: list[ServerEnd] = []
        self._places: RankFiles | EngineRanks | RemoteEngine | None = None
        self._local: list[RankProcess] = []  # rank 0 first
        self._remote: list[RemoteRank] = []
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._reported = False  # the first exit has been noticed
        try:
            if hosts is not None and process:
                self._places = RemoteEngine(hosts, engine_folder, settings, process, self._paths)
            elif hosts is not None:
                self._places = EngineRanks(hosts, engine_folder, settings)
            elif ranks > 1:
                self._places = RankFiles(ranks)
            self._start(command, engine_folder, settings, name)
        except (OSError, ValueError):
            self.kill()
            self._close_links()
            raise

    def _start(
        self, command: Sequence[str], engine_folder: str, settings: EngineSettings, name: str
    ) -> None:
        """Start the ranks on this machine, and have their hosts start the others."""
        places = self._places
        for rank in range(settings.ranks or 1):
            if isinstance(places, RemoteEngine):
                self._remote.append(places.start(rank))
                continue
            if isinstance(places, EngineRanks) and places.is_remote(rank):
                self._remote.append(places.start_remote(rank))
                continue
            sockets = [str(path) for path in self._paths]
            if rank > 0:
                self._follower_links.append(ServerEnd())
                sockets = [str(self._follower_links[-1].path)]
            place = None if places is None else places.place(rank)
            order = StartOrder(sockets, engine_folder, settings.to_json(), os.getpid(), place)
            variables = places.variables if isinstance(places, EngineRanks) else None
            self._local.append(RankProcess(command, order, name, variables))
        if isinstance(places, EngineRanks):
            places.remove()

    @property
    def process_id(self) -> int | None:
        """The process of rank 0; None: it is on another machine."""
        return self._local[0].process_id if self._local else None

    @property
    def process_ids(self) -> list[int]:
        """The processes on this machine."""
        return [process.process_id for process in self._local]

    @property
    def awaits_hosts(self) -> bool:
        """Return whether ranks on other machines cannot be started yet."""
        return any(rank.awaited for rank in self._remote)

    @property
    def _ranks(self) -> list[RankProcess | RemoteRank]:
        return [*self._local, *self._remote]

    @property
    def state(self) -> EngineState:
        """Return the state of all processes, from the kernels of all machines."""
        states = [rank.state for rank in self._ranks]
        stopped = [
            rank.label.removesuffix(": ") or "it"
            for rank, state in zip(self._ranks, states, strict=True)
            if state.stopped
        ]
        seconds = None if self._remote else sum(state.cpu_seconds for state in states)
        return EngineState(stopped[0] if stopped else "", seconds)

    def link_path(self, index: int) -> str:
        """Return the path of the socket that this front end binds."""
        return str(self._paths[index])

    def drop_frontend(self, index: int) -> None:
        """Cancel the requests of a front end that has ended. Its successor gets a new socket."""
        remove_socket(self._paths[index])
        before = self._paths[index]
        self._paths[index] = path = new_socket_path()
        address = str(path)
        if isinstance(self._places, RemoteEngine):
            address = self._places.replace_link(before, path)
        self.link.send(DropFrontEnd(index, address))

    def unlink_sockets(self) -> None:
        """Remove the sockets that are connected from the file system."""
        self.link.unlink_socket()
        for link in self._follower_links:
            link.unlink_socket()
        if self._places is not None:
            self._places.remove()

    def attach(
        self,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[str], None],
        has_reason: Callable[[], bool],
    ) -> None:
        """Call these on the running event loop for each message, and once for the first exit.

        `has_reason` says whether a process has sent the reason of its exit.
        """
        self._event_loop = asyncio.get_running_loop()
        self.link.attach(on_message)
        for rank, link in enumerate(self._follower_links, start=1):
            link.attach(partial(_name_rank, rank, on_message))
        links = [self.link, *self._follower_links, *(None for _ in self._remote)]
        links = links[: len(self._ranks)]  # rank 0 may be on another machine
        for rank_process, own_link in zip(self._ranks, links, strict=True):
            threading.Thread(
                target=self._wait_for_exit,
                args=(rank_process, own_link, on_message, on_exit, has_reason),
                daemon=True,
            ).start()

    async def wait(self, seconds: float) -> bool:
        """Return whether all processes end within this time."""
        for _ in range(max(1, round(seconds / 0.01))):
            if all(rank.ended for rank in self._ranks):
                return True
            await asyncio.sleep(0.01)
        return False

    def show_stacks(self) -> None:
        for rank in self._ranks:
            rank.show_stacks()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        """Close the links. Reap processes that were killed, unless threads wait for them."""
        self._close_links()
        if self._event_loop is None:
            self.reap()

    def reap(self) -> None:
        """Wait for the end of killed processes. This blocks: do not call it on an event loop."""
        for rank in self._ranks:
            rank.reap()

    def abandon(self) -> None:
        """Kill the processes and remove their files, from any thread, before this process ends."""
        self.kill()
        for path in self._paths:
            remove_socket(path)
        for link in self._follower_links:
            link.unlink_socket()
        if self._places is not None:
            self._places.remove()

    def _close_links(self) -> None:
        for link in (self.link, *self._follower_links):
            link.close()
        for path in self._paths:
            remove_socket(path)
        if isinstance(self._places, RemoteEngine):
            self._places.close()
        elif self._places is not None:
            self._places.remove()

    def _wait_for_exit(
        self,
        process: RankProcess | RemoteRank,
        link: ServerEnd | None,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[str], None],
        has_reason: Callable[[], bool],
    ) -> None:
        code = process.wait()
        assert self._event_loop is not None

        def report(patience: float) -> None:
            """Report the exit once all that was sent before it is read: outputs and the reason."""
            if link is not None:
                link.receive_waiting()
            if process.reason:
                on_message(EngineFailed(f"{process.label}{process.reason}"))
            if code == EXIT_WITH_REASON and not has_reason() and patience > 0:
                assert self._event_loop is not None
                self._event_loop.call_later(0.02, report, patience - 0.02)
                return
            on_message(EngineFailed(process.describe_exit(code)))
            finish(_REAP_SECONDS)

        def finish(patience: float) -> None:
            """Report the exit once the other ranks have ended, too: they hold memory."""
            assert self._event_loop is not None
            if patience > 0 and not all(rank.ended for rank in self._ranks):
                self._event_loop.call_later(0.02, finish, patience - 0.02)
            else:
                on_exit(process.describe_exit(code))

        def notice() -> None:
            """End the other ranks at once: they may wait for this one for ever."""
            if not self._reported:
                self._reported = True
                self.kill()
                report(_REASON_SECONDS)

        try:
            self._event_loop.call_soon_threadsafe(notice)
        except RuntimeError:
            return  # the event loop is closed, so there is no one to report to


def _name_rank(rank: int, on_message: Callable[[FromEngine], None], message: FromEngine) -> None:
    """Pass on the reason why a following rank ends. It sends nothing else."""
    if isinstance(message, EngineFailed):
        on_message(EngineFailed(f"rank {rank}: {message.reason}"))


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process that is started with -P.

    If Slipstream runs from a checkout, PYTHONPATH includes it.
    """
    # Weights in huge pages: a decode step reads all of them, and takes a fifth longer with small
    # pages.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | dict(os.environ)
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, CLUSTER_KEY_VARIABLE):
        # keys of the server, which the code of a model must not see
        environment.pop(variable, None)
    root = Path(slipstream.__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return environment
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path}
