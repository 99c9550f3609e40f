"""The link between a server process and an engine process: a Unix socket that only this user can
open.

A message is one byte for its kind, followed by the msgpack form of one dataclass of
`engine/messages.py` or `engine/request.py`. Both ends decode into exactly those types and refuse
anything else, so a message cannot cause code to run. This module has the messages and the server's
end, which runs on an event loop. `engine_end.py` has the engine's end, which blocks.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream.engine.messages import (
    Cancel,
    DropFrontEnd,
    EngineInfo,
    EngineStats,
    Shutdown,
    StatsPeriod,
    StepOutputs,
)
from slipstream.engine.request import GenerateRequest

EXIT_WITH_REASON = 70  # exit code of an engine process that has sent `EngineFailed`
_BYTES_AT_ONCE = 2 << 20  # bytes of messages that are read before the event loop does other work
_FOLDER_PREFIX = "slipstream-"
_LOCK = "lock"  # a file that is locked while its folder is used
_LONGEST_PATH = 100  # bytes in the path of a Unix socket; the kernel's limit is 107


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """The place of a process among the ranks of its engine on the same machine."""

    rank: int
    size: int
    # of rank 0: the open descriptor that listens at the address of the store
    listener: int | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a process among the ranks of an engine."""

    rank: int
    size: int  # number of ranks
    # path of the file over which the ranks meet; on several machines, HOST:PORT of rank 0
    store: str
    sockets: list[str]  # paths of the sockets of ranks 1, 2, …; on several machines, none
    local: LocalPlace | None = None  # None: all ranks are on this machine


@dataclass(frozen=True, slots=True)
class StartOrder:
    """The argument of the engine process, as JSON on its command line."""

    # one path per front end of the server; of a following rank, the one for its last message
    sockets: list[str]
    engine_folder: str
    settings: dict[str, Any]
    parent_process: int
    place: RankPlace | None = None  # None: the engine has one rank


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine's last message: the reason why its process exits."""

    reason: str


ToLoop = GenerateRequest | Cancel | StatsPeriod | Shutdown
ToEngine = ToLoop | DropFrontEnd  # the engine's end of the links carries out the latter
FromEngine = EngineInfo | StepOutputs | EngineStats | EngineFailed

_TO_ENGINE: dict[bytes, type] = {
    b"G": GenerateRequest,
    b"C": Cancel,
    b"P": StatsPeriod,
    b"D": DropFrontEnd,
    b"Q": Shutdown,
}
_FROM_SECONDARY: dict[bytes, type] = {b"G": GenerateRequest, b"C": Cancel}
_FROM_ENGINE: dict[bytes, type] = {
    b"I": EngineInfo,
    b"O": StepOutputs,
    b"S": EngineStats,
    b"F": EngineFailed,
}
_KINDS = _TO_ENGINE | _FROM_ENGINE
_KIND_OF = {message_type: kind for kind, message_type in _KINDS.items()}
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(message_type) for kind, message_type in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


_locks: dict[Path, int] = {}  # descriptors of the locked files of this process, by folder


class LinkError(Exception):
    """A frame that is not a message of this link, or a message in the wrong direction."""


def encode(message: ToEngine | FromEngine) -> bytes:
    return _KIND_OF[type(message)] + _ENCODER.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    message: ToEngine = _decode(frame, _TO_ENGINE)
    return message


def decode_from_secondary(frame: bytes) -> GenerateRequest | Cancel:
    """Decode a message of a front end that does not own the engine process."""
    message: GenerateRequest | Cancel = _decode(frame, _FROM_SECONDARY)
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    message: FromEngine = _decode(frame, _FROM_ENGINE)
    return message


def _decode(frame: bytes, allowed: dict[bytes, type]) -> Any:
    kind = frame[:1]
    if kind not in allowed:
        raise LinkError(f"unexpected kind of message on the link: {kind!r}")
    try:
        return _DECODERS[kind].decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LinkError(f"damaged {allowed[kind].__name__} on the link: {error}") from error


class ServerEnd:
    """The server's end of the link.

    It needs no event loop before `attach`, so that the engine can start to load at once.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the result of `new_socket_path`; None: a new one."""
        self.path = path or new_socket_path()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        configure(self._socket, linger_ms=0)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        try:
            self._socket.bind(f"ipc://{self.path}")
            os.chmod(self.path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise LinkError(f"the socket {self.path} cannot be bound: {error}") from error

    def attach(self, on_message: Callable[[FromEngine], None]) -> None:
        """Call `on_message` on the running event loop for each message, including waiting ones."""
        self._event_loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._event_loop.add_reader(self._socket.FD, self.receive_some)
        self.receive_some()

    def send(self, message: ToEngine) -> bool:
        """Send a message; return False when the other end is not connected.

        The requests of a dead process fail when its exit is noticed.
        """
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # zmq's descriptor is edge triggered and sending may consume the edge, so poll once more.
        if self._event_loop is not None and self._socket.poll(0):
            self._event_loop.call_soon(self.receive_some)
        return True

    def receive_waiting(self, most_bytes: float = math.inf) -> bool:
        """Pass on every message that has arrived, or about this many bytes of them.

        Return whether there may be more.
        """
        received = 0
        while not self._socket.closed and self._on_message is not None:
            if received > most_bytes:
                return True
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            received += len(frame)
            self._on_message(decode_from_engine(frame))
        return False

    def receive(self, seconds: float) -> FromEngine | None:
        """Return the next message, without an event loop; None if none comes within this time."""
        if not self._socket.poll(round(seconds * 1000)):
            return None
        return decode_from_engine(self._socket.recv())

    def receive_some(self) -> None:
        """Pass on messages for a few milliseconds, and the others after other work."""
        if self.receive_waiting(_BYTES_AT_ONCE) and self._event_loop is not None:
            self._event_loop.call_soon(self.receive_some)

    def close(self) -> None:
        if self._socket.closed:
            return
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._context.term()
        self.unlink_socket()

    def unlink_socket(self) -> None:
        """Remove the socket from the file system.

        It is not needed once both ends are connected, and a server that is killed later leaves no
        file behind.
        """
        remove_socket(self.path)


def new_socket_path() -> Path:
    """Return a path for a socket, in a new folder that only this user may enter.

    The path is short enough for a socket.
    """
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    if len(folder) > _LONGEST_PATH - len("/engine"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp")
    _lock(Path(folder))
    return Path(folder) / "engine"


def remove_socket(path: Path) -> None:
    """Remove a socket and its folder."""
    shutil.rmtree(path.parent, ignore_errors=True)
    descriptor = _locks.pop(path.parent, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_left_folders() -> None:
    """Remove the folders of servers that were killed while their engines loaded."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        for lock in Path(place).glob(f"{_FOLDER_PREFIX}*/{_LOCK}"):
            try:
                with lock.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            except OSError:
                continue  # of another user, or of a process that runs


def _lock(folder: Path) -> None:
    """Mark a folder as used, until it is removed or this process ends."""
    unlocked = folder / f"{_LOCK}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)
    _locks[folder] = descriptor


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def configure(socket: zmq.Socket[bytes], linger_ms: int) -> None:
    # No limit on queued messages: the sender must not block, and a full queue would look like a
    # dead peer to it. The requests that the server admits bound the queue.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, linger_ms)


class RankFiles:
    """The files over which the ranks of an engine meet, in a folder that only this user may
    enter.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._path = new_socket_path()

    def place(self, rank: int) -> RankPlace:
        folder = self._path.parent
        sockets = [str(folder / f"rank{other}") for other in range(1, self._ranks)]
        return RankPlace(rank, self._ranks, str(folder / "store"), sockets)

    def remove(self) -> None:
        """Remove the files. They are not needed once the ranks have met."""
        remove_socket(self._path)
