"""The engine's end of its links: one to each front end of the server.

    links = EngineEnd(["/tmp/slipstream-a/engine", "/tmp/slipstream-b/engine"])

Link 0 leads to the primary front end, which starts and watches the engine. It gets the statistics.
The other front ends may send requests and cancel them, nothing else. Each front end gets the
outputs of its own requests. A socket that no front end has bound yet keeps its messages, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from slipstream.engine.messages import (
    FRONTEND_SHIFT,
    Cancel,
    DropFrontEnd,
    EngineInfo,
    StepOutputs,
)
from slipstream.engine.request import GenerateRequest
from slipstream.server.engine_link.link import (
    FromEngine,
    LinkError,
    ToEngine,
    ToLoop,
    configure,
    decode_from_secondary,
    decode_to_engine,
    encode,
)
from slipstream.server.engine_link.split import OutputSplitter, split_logits

if TYPE_CHECKING:
    from slipstream.server.engine_link.cluster.key import ClusterKey

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25


class EngineEnd:
    """All links of an engine. It blocks while the engine has no work."""

    heartbeat_seconds = HEARTBEAT_SECONDS

    def __init__(self, paths: Sequence[str], key: ClusterKey | None = None) -> None:
        """paths: of the sockets that front ends bind; with a key, endpoints on another machine"""
        self._key = key
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = [self._connect(path, index) for index, path in enumerate(paths)]
        self._splitter = OutputSplitter()
        self._info: EngineInfo | None = None
        # the unfinished requests of each front end; of the primary they are not needed
        self._live: list[set[int]] = [set() for _ in paths]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            for part in split_logits(message):
                self._send_outputs(part)
        elif isinstance(message, EngineInfo):
            self._info = message
            for socket in self._sockets:
                socket.send(encode(message))
        else:
            for socket in self._sockets[:1]:  # a following rank may have none
                socket.send(encode(message))

    def wait(self, seconds: float | None) -> bool:
        """Wait for a message, at most for this long; return whether there is one."""
        return bool(self._poller.poll(None if seconds is None else round(seconds * 1000)))

    def receive_waiting(self) -> list[ToLoop]:
        if not self._poller.poll(0):
            return []
        messages: list[ToLoop] = []
        for frame in _frames(self._sockets[0]):
            messages.append(self._obey(decode_to_engine(frame)))
        for index in range(1, len(self._sockets)):
            for frame in _frames(self._sockets[index]):
                try:
                    message = decode_from_secondary(frame)
                    self._check_owner(index, message)
                except LinkError as error:
                    logger.error("a message of front end %d is ignored: %s", index, error)
                else:
                    messages.append(message)
        return messages

    def watch(self, descriptor: int) -> None:
        """Have `wait` return when this descriptor is readable, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def close(self, linger_ms: int | None = None) -> None:
        """Close the links once everything is sent, or after a second or `linger_ms` at most."""
        for socket in self._sockets:
            socket.close(linger_ms)
        self._context.term()

    def _connect(self, path: str, index: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PAIR)
        # the others have often ended before the engine does, and cannot take anything
        configure(socket, linger_ms=200 if index else 1000)
        if self._key is None:
            socket.connect(f"ipc://{path}")
        else:
            self._key.connect(socket)
            socket.connect(path)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _send_outputs(self, outputs: StepOutputs) -> None:
        if len(self._sockets) == 1:
            self._sockets[0].send(encode(outputs))
            return
        for index, part in self._splitter.split(outputs):
            self._sockets[index].send(encode(part))
        if any(outputs.finish_reasons):
            for request_id, reason in zip(outputs.request_ids, outputs.finish_reasons, strict=True):
                if reason:
                    self._live[request_id >> FRONTEND_SHIFT].discard(request_id)

    def _obey(self, message: ToEngine) -> ToLoop:
        """Return a message of the primary front end as the engine understands it."""
        if not isinstance(message, DropFrontEnd):
            return message
        index = message.index
        # What the old front end has sent or not read goes with its socket.
        self._poller.unregister(self._sockets[index])
        self._sockets[index].close(linger=0)
        self._sockets[index] = self._connect(message.socket, index)
        if self._info is not None:
            self._sockets[index].send(encode(self._info))
        request_ids = sorted(self._live[index])
        self._live[index].clear()
        return Cancel(request_ids)

    def _check_owner(self, index: int, message: GenerateRequest | Cancel) -> None:
        """Refuse a message about requests of another front end; keep the ids of new requests."""
        if isinstance(message, GenerateRequest):
            request_ids = [message.request_id]
        else:
            request_ids = message.request_ids
        for request_id in request_ids:
            if request_id >> FRONTEND_SHIFT != index:
                raise LinkError(f"request id {request_id} belongs to another front end")
        if isinstance(message, GenerateRequest):
            self._live[index].add(message.request_id)


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames that have arrived."""
    frames = []
    while socket.poll(0):
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames
