"""Lends the engine of this process to servers that this process starts.

A server starts `engine_worker/lent.py` where it would start an engine process. That program sends
the order here, over a Unix socket that only this user can open. The front ends of the server are
then linked to the engine of this process. The connection closes when the server leaves the engine.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import msgspec

from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.engine_link.link import StartOrder, new_socket_path, remove_socket

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # of an order


class EngineLender:
    def __init__(self, engine: InProcessEngine) -> None:
        self.path = new_socket_path()
        self._engine = engine
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="lender", daemon=True).start()

    def close(self) -> None:
        """Lend to no further server."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        remove_socket(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it is closed
            threading.Thread(target=self._lend, args=(connection,), daemon=True).start()

    def _lend(self, connection: socket.socket) -> None:
        """Lend the engine as long as the connection is open."""
        with connection:
            with connection.makefile("rb") as lines:
                line = lines.readline(_MOST_BYTES)
            try:
                order = msgspec.json.decode(line, type=StartOrder)
            except msgspec.MsgspecError as error:
                logger.error("an order to lend the engine is damaged: %s", error)
                return

            def hang_up() -> None:
                with suppress(OSError):  # the other end has hung up before
                    connection.shutdown(socket.SHUT_RDWR)

            try:
                self._engine.lend(order.sockets, hang_up)
            except EngineUnavailable as error:
                connection.sendall(str(error).encode())
                return
            connection.recv(1)  # nothing comes: it ends when one of the two hangs up
            self._engine.take_back(order.sockets)
