"""Connections from a secondary front end to the primary one.

A connection is a pair of sockets. The secondary front end keeps one of them and sends the other to
the primary one, over a socket that both have from the start. So there is no address that another
program could connect to, and no file that could be left behind.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

HTTP = b"h"  # kinds of connections
GRPC = b"g"
_RETRY_SECONDS = 0.001

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Upstream:
    """The end of the secondary front end."""

    def __init__(self, carrier: socket.socket) -> None:
        carrier.setblocking(False)
        self._carrier = carrier

    async def connect(self, kind: bytes) -> Streams:
        """Return a new connection to the primary front end. Raises OSError if that has ended."""
        own, other = socket.socketpair()
        try:
            await self._send(kind, other)
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        return await asyncio.open_unix_connection(sock=own)

    async def _send(self, kind: bytes, other: socket.socket) -> None:
        while True:
            try:
                socket.send_fds(self._carrier, [kind], [other.fileno()])
                return
            except BlockingIOError:  # the primary front end is busy
                await asyncio.sleep(_RETRY_SECONDS)


class ConnectionReceiver:
    """The end of the primary front end, for one secondary one."""

    def __init__(
        self, carrier: socket.socket, on_connection: Callable[[bytes, socket.socket], None]
    ) -> None:
        """`on_connection` is called with the kind and the socket of each connection."""
        carrier.setblocking(False)
        self._carrier = carrier
        self._on_connection = on_connection
        asyncio.get_running_loop().add_reader(carrier.fileno(), self._receive)

    def _receive(self) -> None:
        while True:
            try:
                kind, descriptors, _, _ = socket.recv_fds(self._carrier, 1, 1)
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("cannot receive a connection of a front end: %s", error.strerror)
                return
            if not kind:  # the front end has ended
                self.close()
                return
            if descriptors:
                self._on_connection(kind, socket.socket(fileno=descriptors[0]))
            else:  # the kernel has closed the connection, so the front end answers with an error
                logger.warning("cannot receive a connection of a front end: too many open files")

    def close(self) -> None:
        if self._carrier.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._carrier.fileno())
            self._carrier.close()
