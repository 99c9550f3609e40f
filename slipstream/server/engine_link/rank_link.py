"""The channels from the leading rank of an engine to its followers: one socket for each. It is a
Unix socket, or between machines a TCP socket with the cluster key.

A frame is one byte for its kind and the msgpack form of one dataclass of `engine/ranks/orders.py`
or of `engine/plan.py`. Both ends decode into exactly those types and refuse anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq

from slipstream.engine.plan import StepPlan
from slipstream.engine.ranks.orders import (
    AdapterGone,
    AdapterHere,
    DigestRequest,
    Leave,
    Order,
    RowDigests,
)
from slipstream.kernels.rank_errors import RankLost
from slipstream.server.engine_link.cluster.key import ClusterKey, Gate
from slipstream.server.engine_link.link import LinkError, configure

_ANSWER_SECONDS = 60.0  # longest wait for a follower that has steps to finish
_POLL_SECONDS = 0.1

_ORDERS: dict[bytes, type] = {
    b"P": StepPlan,
    b"A": AdapterHere,
    b"G": AdapterGone,
    b"D": DigestRequest,
    b"L": Leave,
}
_KIND_OF = {order_type: kind for kind, order_type in _ORDERS.items()}
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(order_type) for kind, order_type in _ORDERS.items()
}
_DIGESTS = msgspec.msgpack.Decoder(RowDigests)
_ENCODER = msgspec.msgpack.Encoder()


def encode_order(order: Order) -> bytes:
    return _KIND_OF[type(order)] + _ENCODER.encode(order)


def decode_order(frame: bytes) -> Order:
    decoder = _DECODERS.get(frame[:1])
    if decoder is None:
        raise LinkError(f"unexpected kind of order: {frame[:1]!r}")
    try:
        order: Order = decoder.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        name = _ORDERS[frame[:1]].__name__
        raise LinkError(f"damaged {name} from the leading rank: {error}") from error
    return order


class FollowerLinks:
    """The leader's end of the channels to all followers."""

    def __init__(self, paths: Sequence[str], find_failure: Callable[[], str] = lambda: "") -> None:
        """paths: the sockets of ranks 1, 2, … . find_failure: returns why a follower has ended, if
        that is known
        """
        self._find_failure = find_failure
        self._context = zmq.Context()
        self._gate: Gate | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        for path in paths:
            self._add_socket().connect(f"ipc://{path}")

    @classmethod
    def listen(cls, address: str, followers: int, key: ClusterKey) -> FollowerLinks:
        """Listen at an IP address for followers on other machines. `endpoints` says where."""
        links = cls([])
        links._gate = Gate(links._context, key)
        for _ in range(followers):
            socket = links._add_socket()
            key.listen(socket)
            socket.bind(f"tcp://{address}:*")
        return links

    @property
    def endpoints(self) -> list[str]:
        """The addresses of the sockets that listen, by follower."""
        return [socket.get_string(zmq.LAST_ENDPOINT) for socket in self._sockets]

    def _add_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PAIR)
        configure(socket, linger_ms=1000)
        self._sockets.append(socket)
        return socket

    def send(self, order: Order, follower: int | None = None) -> None:
        frame = encode_order(order)
        for socket in self._sockets if follower is None else [self._sockets[follower]]:
            socket.send(frame)

    def receive_digests(self) -> list[RowDigests]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        return [
            self._receive(socket, rank, deadline)
            for rank, socket in enumerate(self._sockets, start=1)
        ]

    def close(self) -> None:
        """Close the channels once everything is sent, or after a second at most."""
        for socket in self._sockets:
            socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _receive(self, socket: zmq.Socket[bytes], rank: int, deadline: float) -> RowDigests:
        while not socket.poll(round(_POLL_SECONDS * 1000)):
            if failure := self._find_failure():
                raise RankLost(failure)
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} did not answer for {_ANSWER_SECONDS:g} s")
        try:
            return _DIGESTS.decode(socket.recv())
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LinkError(f"damaged digests of rank {rank}: {error}") from error


class LeaderLink:
    """A follower's end of its channel."""

    def __init__(self, endpoint: str, key: ClusterKey | None = None) -> None:
        """endpoint: path of a socket to bind; with a key, an endpoint of `FollowerLinks.listen`"""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        configure(self._socket, linger_ms=1000)
        if key is None:
            self._socket.bind(f"ipc://{endpoint}")
        else:
            key.connect(self._socket)
            self._socket.connect(endpoint)

    def orders(self) -> Iterator[Order]:
        """Yield the leader's orders as they come."""
        while True:
            yield decode_order(self._socket.recv())

    def answer(self, digests: RowDigests) -> None:
        self._socket.send(_ENCODER.encode(digests))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
