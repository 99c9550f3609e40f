"""A rank host: a process that a launcher started as a rank other than 0. It starts, watches and
ends ranks on its machine for the leader, and ends with it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link import child
from slipstream.server.engine_link.cluster.address import AddressError, resolve
from slipstream.server.engine_link.cluster.calls import Calls
from slipstream.server.engine_link.cluster.division import find_local_place
from slipstream.server.engine_link.cluster.leader import (
    HEARTBEAT_SECONDS,
    MISSED_HEARTBEATS,
    REPORT_SECONDS,
    ClusterOptions,
    set_heartbeats,
)
from slipstream.server.engine_link.cluster.messages import (
    EndRank,
    FromHost,
    LeaderLeaves,
    Machine,
    RankEnded,
    RanksMet,
    RankStopped,
    Refused,
    ShowStacks,
    StartRank,
    ToHost,
    decode_to_host,
    describe_software,
    encode,
)
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    EngineFailed,
    LinkError,
    RankFiles,
    RankPlace,
    ServerEnd,
    StartOrder,
    configure,
)
from slipstream.server.engine_link.visible_gpus import visible_gpus
from slipstream.weights.integrity import identify_folder

logger = logging.getLogger(__name__)

_REASON_SECONDS = 1.0  # longest wait for the reason that a rank sent before its exit
_REFUSALS = 3  # failed handshakes in a row that show another cluster key
_TICK_MS = 500
_CONNECT_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RankProblem(Exception):
    """A rank cannot run on this machine. The text is for the leader's log."""


@dataclass
class _Rank:
    process: child.RankProcess
    # for the reason of its exit; rank 0 of a whole engine sends it to the front ends
    link: ServerEnd | None
    stopped: bool = False  # by a signal, as the leader knows


class RankHost:
    def __init__(
        self,
        options: ClusterOptions,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        command: Sequence[str] | None = None,
    ) -> None:
        """command: of a rank's process; None: that of engines"""
        self._options = options
        self._heartbeat_seconds = heartbeat_seconds
        self._command = command or child.ENGINE_COMMAND
        self._ranks: dict[tuple[int, int], _Rank] = {}  # engine, rank → rank
        self._files: dict[int, RankFiles] = {}  # of whole engines, until their ranks have met
        self._calls = Calls()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, linger_ms=1000)
        set_heartbeats(self._socket, heartbeat_seconds)
        options.key.connect(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        self._leader = ""  # its IP address, once it is known
        self._connected = False
        self._refusals = 0  # failed handshakes since the last connection
        # when this host gives up, while it is not connected
        self._deadline = time.monotonic() + options.wait_seconds
        self._report_time = time.monotonic() + REPORT_SECONDS
        self._signals = 0
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve the leader until it ends. Returns the exit code."""
        before = [
            signal.signal(
                number, lambda number, frame: self._calls.add(partial(self._end_on_signal, number))
            )
            for number in _SIGNALS
        ]
        wakeup = signal.set_wakeup_fd(self._calls.writing.fileno(), warn_on_full_buffer=False)
        try:
            self._connect()
            while self._exit_code is None:
                self._step()
            return self._exit_code
        finally:
            self._kill_all()
            signal.set_wakeup_fd(wakeup)
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
            self._close()

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._calls.close()

    def _connect(self) -> None:
        """Connect to the leader once its address resolves. A name may appear later."""
        launched = self._options.launched
        address = self._options.address
        logger.info(
            "process %d of %d from %s runs ranks for rank 0 at %s",
            launched.rank,
            launched.size,
            launched.launcher,
            address,
        )
        while not self._leader and self._exit_code is None:
            try:
                self._leader = resolve(address.host)
            except AddressError as error:
                self._check_patience(str(error))
                self._calls.run_waiting()  # signals
                time.sleep(_TICK_MS / 1000)
        self._socket.connect(f"tcp://{self._leader}:{address.port}")

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._calls.descriptor):
            poller.register(source, zmq.POLLIN)
        poller.poll(_TICK_MS)
        self._read_events()
        self._calls.run_waiting()
        self._read_orders()
        self._report_stops()
        if not self._connected and self._exit_code is None:
            self._check_patience(f"rank 0 at {self._options.address} cannot be reached")

    def _read_orders(self) -> None:
        while self._exit_code is None and self._socket.poll(0):
            try:
                self._obey(decode_to_host(self._socket.recv()))
            except LinkError as error:
                logger.error("a message of rank 0 is ignored: %s", error)

    def _report_stops(self) -> None:
        """Report ranks that a signal has stopped or continued: the leader cannot see them."""
        for place, rank in self._ranks.items():
            stopped = rank.process.state.stopped
            if stopped is not rank.stopped:
                rank.stopped = stopped
                self._send(RankStopped(*place, stopped))

    def _check_patience(self, problem: str) -> None:
        """Say now and then what is awaited, and end this host if it takes too long."""
        now = time.monotonic()
        if now >= self._deadline:
            seconds = self._options.wait_seconds
            logger.error("%s after %g s (--rank-wait-secs): this process ends", problem, seconds)
            self._exit_code = 1
        elif now >= self._report_time:
            self._report_time = now + REPORT_SECONDS
            logger.info("%s; it is tried again", problem)

    def _end_on_signal(self, number: int) -> None:
        """End now if no rank runs here. Otherwise the leader ends it, once it has drained."""
        self._signals += 1
        if not self._ranks:
            self._exit_code = 0
        elif self._signals > 1:
            self._exit_code = 128 + number
        else:
            logger.info("%s: this process ends with rank 0", signal.Signals(number).name)

    # -- the connection

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusals = 0
                self._connected = True
                launched = self._options.launched
                name = socket.gethostname()
                self._send(Machine(launched.rank, launched.job, name, describe_software()))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refusals += 1
                if self._refusals >= _REFUSALS:
                    self._report_wrong_key()
            elif self._connected:
                self._lose_leader()

    def _report_wrong_key(self) -> None:
        logger.error(
            "rank 0 at %s refuses this process: its cluster key is another one; give all processes "
            "the same key",
            self._options.address,
        )
        self._exit_code = 1

    def _lose_leader(self) -> None:
        """End the ranks, which cannot go on. Wait for the leader only if it still runs."""
        self._connected = False
        self._read_orders()  # the last one may say that the leader ends
        if self._exit_code is not None:
            return
        self._kill_all()
        self._deadline = time.monotonic() + self._heartbeat_seconds * MISSED_HEARTBEATS
        address = (self._leader, self._options.address.port)
        try:
            socket.create_connection(address, _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            logger.error("rank 0 at %s has ended, and this process with it", self._options.address)
            self._exit_code = 1
        except OSError as error:
            logger.error("the connection to rank 0 is lost: %s", error)
        else:
            logger.warning("the connection to rank 0 was lost, and is made again")

    def _send(self, message: FromHost) -> None:
        if self._connected:  # after a new connection, the leader does not know earlier ranks
            self._socket.send(encode(message))

    # -- orders

    def _obey(self, message: ToHost) -> None:
        if isinstance(message, StartRank):
            self._start(message)
        elif isinstance(message, RanksMet):
            self._remove_files(message.engine)
        elif isinstance(message, EndRank):
            if rank := self._ranks.get((message.engine, message.rank)):
                rank.process.kill()
                rank.process.reap()
        elif isinstance(message, ShowStacks):
            if rank := self._ranks.get((message.engine, message.rank)):
                rank.process.show_stacks()
        elif isinstance(message, Refused):
            logger.error("rank 0 refuses this process: %s", message.reason)
            self._exit_code = 1
        elif isinstance(message, LeaderLeaves):
            self._exit_code = 0

    def _start(self, start: StartRank) -> None:
        place = (start.engine, start.place.rank)
        try:
            self._ranks[place] = rank = self._spawn(start)
        except (RankProblem, OSError, ValueError) as error:
            logger.error("rank %d cannot start: %s", start.place.rank, error)
            self._send(RankEnded(*place, EXIT_WITH_REASON, str(error)))
            return
        threading.Thread(target=self._watch, args=(place, rank.process), daemon=True).start()

    def _spawn(self, start: StartRank) -> _Rank:
        settings = EngineSettings.from_json(start.settings)
        gpus = visible_gpus(settings.device)
        if bool(gpus) != bool(start.gpus):
            kinds = {True: "a GPU", False: "a CPU"}
            raise RankProblem(
                f"this machine runs the engine on {kinds[bool(gpus)]}, and rank 0 on "
                f"{kinds[bool(start.gpus)]}: all ranks need the same kind of device"
            )
        _check_folder(start.engine_folder, start.identity)
        if start.whole:
            return self._spawn_of_replica(start, gpus)
        launched = self._options.launched
        local = find_local_place(launched, gpus, start.index, start.each)
        if gpus == 1 and launched.local_size > 1:
            logger.info(
                "the launcher shows each process one GPU only (as --gpus-per-task does): ranks "
                "cannot read each other's memory, and exchange their sums more slowly"
            )
        return self._run_rank(start, replace(start.place, local=local), self._options.key.variables)

    def _spawn_of_replica(self, start: StartRank, gpus: int) -> _Rank:
        """Start a rank of a replica. This process starts the others, too."""
        launched = self._options.launched
        if gpus != start.gpus:
            raise RankProblem(
                f"this process sees {gpus} GPUs, and rank 0 of {launched.launcher} {start.gpus}: "
                "replicas need as many on each machine"
            )
        sees_all = not 0 < gpus < launched.local_size
        if sees_all and launched.local_rank:
            raise RankProblem(
                f"process {launched.rank} is not the first one on its machine, so that replicas "
                "would share GPUs or cores: fill one machine after the other (srun "
                "--distribution=block, mpirun --map-by slot)"
            )
        ranks = start.place.size
        if ranks > 1 and start.engine not in self._files:
            self._files[start.engine] = RankFiles(ranks)
        place = self._files[start.engine].place(start.place.rank) if ranks > 1 else None
        return self._run_rank(start, place, self._options.key.variables if start.links else {})

    def _run_rank(
        self, start: StartRank, place: RankPlace | None, variables: Mapping[str, str]
    ) -> _Rank:
        link = None if start.links else ServerEnd()
        sockets = start.links if link is None else [str(link.path)]
        order = StartOrder(sockets, start.engine_folder, start.settings, os.getpid(), place)
        try:
            process = child.RankProcess(self._command, order, variables=variables)
        except OSError:
            if link is not None:
                link.close()
            raise
        return _Rank(process, link)

    def _watch(self, place: tuple[int, int], process: child.RankProcess) -> None:
        code = process.wait()
        self._calls.add(partial(self._report_end, place, code))

    def _report_end(self, place: tuple[int, int], code: int) -> None:
        rank = self._ranks.pop(place, None)
        if rank is None:
            return  # it was killed with all others
        reason = ""
        if rank.link is not None:
            if code == EXIT_WITH_REASON:
                message = rank.link.receive(_REASON_SECONDS)
                reason = message.reason if isinstance(message, EngineFailed) else ""
            rank.link.close()
        if all(engine != place[0] for engine, _ in self._ranks):
            self._remove_files(place[0])
        self._send(RankEnded(*place, code, reason))

    def _kill_all(self) -> None:
        ranks = list(self._ranks.values())
        self._ranks.clear()
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.reap()
            if rank.link is not None:
                rank.link.close()
        for engine in list(self._files):
            self._remove_files(engine)

    def _remove_files(self, engine: int) -> None:
        if files := self._files.pop(engine, None):
            files.remove()


def _check_folder(engine_folder: str, identity: str) -> None:
    """Raise RankProblem if this machine has another engine folder than rank 0, or none."""
    try:
        found = identify_folder(engine_folder)
    except OSError as error:
        raise RankProblem(
            f"the engine folder {engine_folder} cannot be read: {error.strerror}; every machine "
            "needs it under the same path"
        ) from error
    if found != identity:
        raise RankProblem(
            f"the engine folder {engine_folder} is another one than on the machine of rank 0: the "
            f"SHA-256 of config.json is {found[:16]}…, there {identity[:16]}…; copy the folder"
        )
