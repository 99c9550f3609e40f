"""The messages between the leader, which is the server, and the rank hosts on other machines.

A frame is one byte for its kind and the msgpack form of one dataclass. Both ends decode into
exactly these types and refuse anything else.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.server.engine_link.link import LinkError, RankPlace
from slipstream.version import VERSION


def describe_software() -> str:
    """Return what must be the same on all machines."""
    torch = importlib.metadata.version("torch")
    return f"slipstream {VERSION} with torch {torch}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank host reports about itself and its machine."""

    process: int  # its rank among the processes of the launcher
    job: str  # of the launcher
    host: str
    software: str  # the result of `describe_software`


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start a rank of an engine."""

    engine: int  # number of the engine's start, unique in the life of the leader
    engine_folder: str
    identity: str  # digest of the engine folder on the leader's machine
    settings: dict[str, Any]
    place: RankPlace
    index: int  # of the rank among those that the host starts
    each: int  # ranks of this engine that the host starts
    gpus: int  # that the leader sees and the engine may use; 0: it runs on a CPU
    # The host starts all ranks of the engine, and they meet there. The place has neither a store
    # nor sockets then.
    whole: bool = False
    # of rank 0 of such an engine: the endpoints that lead to the front ends of the server
    links: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RanksMet:
    """The ranks of a whole engine have met: the files for that are not needed any more."""

    engine: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """Kill a rank."""

    engine: int
    rank: int


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Have a rank write the stacks of its threads to its log."""

    engine: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank has ended, or could not be started."""

    engine: int
    rank: int
    exit_code: int
    reason: str = ""  # why, if the rank knows


@dataclass(frozen=True, slots=True)
class RankStopped:
    """A signal has stopped the process of a rank, or another one has continued it."""

    engine: int
    rank: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The leader cannot use this host."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaderLeaves:
    """The leader ends, and the hosts with it."""


ToHost = StartRank | RanksMet | EndRank | ShowStacks | Refused | LeaderLeaves
FromHost = Machine | RankEnded | RankStopped

_TO_HOST: dict[bytes, type] = {
    b"S": StartRank,
    b"F": RanksMet,
    b"E": EndRank,
    b"T": ShowStacks,
    b"R": Refused,
    b"L": LeaderLeaves,
}
_FROM_HOST: dict[bytes, type] = {b"M": Machine, b"X": RankEnded, b"P": RankStopped}
_KIND_OF = {kind: letter for letter, kind in (_TO_HOST | _FROM_HOST).items()}
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _KIND_OF
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToHost | FromHost) -> bytes:
    return _KIND_OF[type(message)] + _ENCODER.encode(message)


def decode_to_host(frame: bytes) -> ToHost:
    message: ToHost = _decode(frame, _TO_HOST)
    return message


def decode_from_host(frame: bytes) -> FromHost:
    message: FromHost = _decode(frame, _FROM_HOST)
    return message


def _decode(frame: bytes, allowed: dict[bytes, type]) -> Any:
    kind = allowed.get(frame[:1])
    if kind is None:
        raise LinkError(f"unexpected kind of message between machines: {frame[:1]!r}")
    try:
        return _DECODERS[kind].decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LinkError(f"damaged {kind.__name__} between machines: {error}") from error
