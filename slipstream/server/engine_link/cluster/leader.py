"""The leader's end: the rank hosts of other machines, and the ranks that they start for it.

The leader is the server, rank 0 of the launcher. A thread owns the connections. Everything else
reaches it by calls that this thread carries out.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from slipstream.server.engine_link.cluster.address import (
    AddressError,
    LeaderAddress,
    resolve,
    resolves,
)
from slipstream.server.engine_link.cluster.calls import Calls
from slipstream.server.engine_link.cluster.key import ClusterKey, Gate
from slipstream.server.engine_link.cluster.messages import (
    EndRank,
    FromHost,
    LeaderLeaves,
    Machine,
    RanksMet,
    RankStopped,
    Refused,
    ShowStacks,
    StartRank,
    ToHost,
    decode_from_host,
    describe_software,
    encode,
)
from slipstream.server.engine_link.cluster.remote import RemoteRank
from slipstream.server.engine_link.launched import Launched
from slipstream.server.engine_link.link import EXIT_WITH_REASON, LinkError, configure

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
MISSED_HEARTBEATS = 3  # after which a connection is lost
REPORT_SECONDS = 10.0  # between two lines about what is awaited
_TICK_MS = 500
_POD_NAME_SECONDS = 60.0
_LINGER_MS = 1000


@dataclass(frozen=True)
class ClusterOptions:
    """How the server reaches the processes that its launcher started on other machines."""

    launched: Launched
    address: LeaderAddress
    key: ClusterKey
    wait_seconds: float  # longest wait for the report of a process


@dataclass(frozen=True)
class _Host:
    """A connected rank host."""

    identity: bytes  # of its connection
    descriptor: int  # of its connection
    machine: Machine


class RankHosts:
    """All rank hosts of a launcher. Raises AddressError if this machine cannot listen for them."""

    def __init__(self, options: ClusterOptions, heartbeat_seconds: float = HEARTBEAT_SECONDS):
        self.launched = options.launched
        self.key = options.key
        self._wait_seconds = options.wait_seconds
        self._engines = itertools.count(1)
        self._hosts: dict[int, _Host] = {}  # process of the launcher → host
        self._refused: dict[int, str] = {}  # process of the launcher → why it cannot be used
        self._opened = time.monotonic()
        # process of the launcher → when its host was lost; the others are absent from the start
        self._absent_since: dict[int, float] = {}
        self._waiting: list[RemoteRank] = []  # for the report of their hosts
        self._running: dict[tuple[int, int], RemoteRank] = {}  # engine, rank → rank
        self._report_time = time.monotonic() + REPORT_SECONDS
        self._closing = False
        self._calls = Calls()
        self._context = zmq.Context()
        self._gate = Gate(self._context, options.key)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, _LINGER_MS)
        set_heartbeats(self._socket, heartbeat_seconds)
        self.key.listen(self._socket)
        self.address = self._bind(options.address)
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_ACCEPTED
        )
        self._peers: dict[int, str] = {}  # descriptor of a connection → its address
        self._wrong_key = False  # the connection that is closed next has another cluster key
        self._refused_peers: set[str] = set()  # addresses that have been reported
        self._thread = threading.Thread(target=self._run, name="rank hosts", daemon=True)
        self._thread.start()

    def _bind(self, address: LeaderAddress) -> str:
        """Listen at the leader's own address only. Return the IP address."""
        try:
            host = self._resolve(address.host)
            self._socket.bind(f"tcp://{host}:{address.port}")
        except (AddressError, zmq.ZMQError) as error:
            self._gate.close()
            self._socket.close()
            self._context.term()
            raise AddressError(
                f"rank 0 cannot listen at {address} for the ranks of other machines: {error}; "
                "set MASTER_ADDR to an address of this machine and MASTER_PORT to a free port, "
                "in all processes"
            ) from error
        logger.info(
            "rank 0 of %d from %s waits for the others at %s:%d",
            self.launched.size,
            self.launched.launcher,
            host,
            address.port,
        )
        return host

    def _resolve(self, host: str) -> str:
        """Return the leader's IP address. The name of a pod resolves a while after its start."""
        patience = _POD_NAME_SECONDS if self.launched.launcher == "LeaderWorkerSet" else 0.0
        deadline = time.monotonic() + patience
        while not resolves(host) and time.monotonic() < deadline:
            time.sleep(_TICK_MS / 1000)
        return resolve(host)

    def next_engine(self) -> int:
        """Return a number for the start of an engine."""
        return next(self._engines)

    def start(self, process: int, start: StartRank) -> RemoteRank:
        """Start a rank as soon as its host has reported."""
        rank = RemoteRank(process, start, self._end_later, self._show_stacks_later)
        self._calls.add(partial(self._start, rank))
        return rank

    def note_met(self, process: int, engine: int) -> None:
        """Tell the host of all ranks of an engine that these have met."""
        self._calls.add(partial(self._send_met, process, engine))

    def close(self) -> None:
        """End all hosts."""
        self._calls.add(self._leave)
        self._thread.join()

    def _end_later(self, rank: RemoteRank) -> None:
        self._calls.add(partial(self._end, rank))

    def _show_stacks_later(self, rank: RemoteRank) -> None:
        message = ShowStacks(rank.start.engine, rank.start.place.rank)
        self._calls.add(partial(self._send_about, rank, message))

    # -- all below runs in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._calls.descriptor):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            poller.poll(_TICK_MS)
            self._read_events()
            self._calls.run_waiting()
            self._read_messages()
            self._check_waiting()
        for rank in [*self._waiting, *self._running.values()]:
            rank.set_ended(-signal.SIGKILL)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._gate.close()
        self._context.term()
        self._calls.close()

    def _leave(self) -> None:
        for host in self._hosts.values():
            self._send(host, LeaderLeaves())
        self._closing = True

    def _start(self, rank: RemoteRank) -> None:
        host = self._hosts.get(rank.process)
        if host is not None:
            self._start_on(rank, host)
        elif reason := self._refused.get(rank.process):
            rank.set_ended(EXIT_WITH_REASON, reason)
        else:
            self._waiting.append(rank)

    def _start_on(self, rank: RemoteRank, host: _Host) -> None:
        rank.host = host.machine.host
        self._running[rank.start.engine, rank.start.place.rank] = rank
        self._send(host, rank.start)

    def _end(self, rank: RemoteRank) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)
            rank.set_ended(-signal.SIGKILL)
        else:
            self._send_about(rank, EndRank(rank.start.engine, rank.start.place.rank))

    def _send_about(self, rank: RemoteRank, message: ToHost) -> None:
        if not rank.ended and (host := self._hosts.get(rank.process)):
            self._send(host, message)

    def _send_met(self, process: int, engine: int) -> None:
        if host := self._hosts.get(process):
            self._send(host, RanksMet(engine))

    def _send(self, host: _Host, message: ToHost) -> None:
        self._socket.send_multipart([host.identity, encode(message)])

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._peers[descriptor] = _peer_of(descriptor)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                peer = self._peers.pop(descriptor, "")
                if self._wrong_key:
                    self._refuse_key(peer)
                self._wrong_key = False
                self._lose(descriptor)
            elif event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self._wrong_key = True

    def _refuse_key(self, peer: str) -> None:
        if peer not in self._refused_peers:
            self._refused_peers.add(peer)
            logger.error(
                "a process at %s is refused: its cluster key is not the one of rank 0", peer
            )

    def _lose(self, descriptor: int) -> None:
        """Note that a connection is lost: its host kills the ranks, or they end with it."""
        for process, host in list(self._hosts.items()):
            if host.descriptor == descriptor:
                del self._hosts[process]
                self._absent_since[process] = time.monotonic()
                self._end_ranks_of(process, "its rank host has ended, or cannot be reached")

    def _end_ranks_of(self, process: int, reason: str) -> None:
        for place, rank in list(self._running.items()):
            if rank.process == process:
                del self._running[place]
                rank.set_ended(EXIT_WITH_REASON, reason)

    def _read_messages(self) -> None:
        while self._socket.poll(0):
            identity, frame, *others = self._socket.recv_multipart(copy=False)
            # The end of an older connection with the same descriptor comes before its message.
            self._read_events()
            try:
                if others:
                    raise LinkError(f"it has {len(others)} parts too many")
                message = decode_from_host(frame.bytes)
            except LinkError as error:
                logger.error("a message of a rank host is ignored: %s", error)
                continue
            self._take(message, identity.bytes, int(frame.get(zmq.MessageOption.SRCFD)))

    def _take(self, message: FromHost, identity: bytes, descriptor: int) -> None:
        if isinstance(message, Machine):
            self._greet(_Host(identity, descriptor, message))
            return
        place = (message.engine, message.rank)
        if isinstance(message, RankStopped):
            if rank := self._running.get(place):
                rank.stopped = message.stopped
        elif rank := self._running.pop(place, None):
            rank.set_ended(message.exit_code, message.reason)

    def _greet(self, host: _Host) -> None:
        machine = host.machine
        reason = self._problem_of(machine)
        if reason:
            logger.error("process %d on %s is refused: %s", machine.process, machine.host, reason)
            self._send(host, Refused(reason))
            self._refused[machine.process] = reason
        else:
            if before := self._hosts.get(machine.process):
                self._send(before, Refused(f"process {machine.process} was started again"))
                self._end_ranks_of(machine.process, "its rank host was started again")
            self._hosts[machine.process] = host
            self._refused.pop(machine.process, None)
        for rank in [rank for rank in self._waiting if rank.process == machine.process]:
            self._waiting.remove(rank)
            rank.host = machine.host
            self._start(rank)

    def _problem_of(self, machine: Machine) -> str:
        """Return why this host cannot be used; empty: it can."""
        if not 0 < machine.process < self.launched.size:
            return (
                f"it is process {machine.process}, and rank 0 is one of {self.launched.size} "
                f"processes from {self.launched.launcher}"
            )
        if machine.job != self.launched.job:
            return (
                f"it belongs to the job {machine.job or 'without a name'} of its launcher, rank 0 "
                f"to {self.launched.job or 'one without a name'}: set another MASTER_PORT for one "
                "of both jobs"
            )
        own = describe_software()
        if machine.software != own:
            return (
                f"it runs {machine.software}, rank 0 runs {own}: install the same on all machines"
            )
        return ""

    def _check_waiting(self) -> None:
        """Say now and then which processes have not reported, and give up on late ones."""
        now = time.monotonic()
        for rank in [rank for rank in self._waiting if self._is_late(rank.process, now)]:
            self._waiting.remove(rank)
            rank.set_ended(
                EXIT_WITH_REASON,
                f"process {rank.process} from {self.launched.launcher} did not report to "
                f"{self.address}:{self.port} within {self._wait_seconds:g} s (--rank-wait-secs): "
                "check that it runs, that it reaches this address, and its log",
            )
        if not self._waiting:
            self._report_time = now + REPORT_SECONDS
        elif now >= self._report_time:
            self._report_time = now + REPORT_SECONDS
            logger.info("%s", self._describe_waiting())

    def _is_late(self, process: int, now: float) -> bool:
        return now >= self._absent_since.get(process, self._opened) + self._wait_seconds

    def _describe_waiting(self) -> str:
        ranks = ", ".join(str(rank.start.place.rank) for rank in self._waiting)
        missing = sorted({rank.process for rank in self._waiting})
        processes = ", ".join(map(str, missing))
        here = ", ".join(
            f"{number} on {host.machine.host}" for number, host in sorted(self._hosts.items())
        )
        where = f" on {self.launched.nodes}" if self.launched.nodes else ""
        return (
            f"waiting for ranks {ranks}: of the processes from {self.launched.launcher}{where}, "
            f"these have not reported: {processes}; these have: {here or 'none'}"
        )


def set_heartbeats(socket: zmq.Socket[bytes], seconds: float) -> None:
    """Have the library close connections whose other end misses heartbeats."""
    socket.set(zmq.HEARTBEAT_IVL, round(seconds * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, round(seconds * MISSED_HEARTBEATS * 1000))


def _peer_of(descriptor: int) -> str:
    """Return the address of the other end of a connection of the library."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return "an unknown address"  # it is closed already
