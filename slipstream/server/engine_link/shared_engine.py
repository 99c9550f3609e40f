"""Connect the engine of this process to servers that this process starts.

A server starts `engine_worker/shared_engine_proxy.py` where it would start an engine process. That
program sends the order here, over a Unix socket that only this user can open. The front ends of the
server are then linked to the engine of this process. The connection closes when the server
disconnects from the engine.
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

_MAX_BYTES = 1 << 20  # of an order


class SharedEngine:
    def __init__(self, engine: InProcessEngine) -> None:
        self.path = new_socket_path()
        self._engine = engine
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="shared-engine", daemon=True).start()

    def close(self) -> None:
        """Accept no further server."""
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
            threading.Thread(target=self._share, args=(connection,), daemon=True).start()

    def _share(self, connection: socket.socket) -> None:
        """Connect a server to the engine until the connection closes."""
        with connection:
            with connection.makefile("rb") as lines:
                line = lines.readline(_MAX_BYTES)
            try:
                order = msgspec.json.decode(line, type=StartOrder)
            except msgspec.MsgspecError as error:
                logger.error("an order to share the engine is damaged: %s", error)
                return

            def close_connection() -> None:
                with suppress(OSError):  # the other end has closed it
                    connection.shutdown(socket.SHUT_RDWR)

            try:
                self._engine.connect_server(order.sockets, close_connection)
            except EngineUnavailable as error:
                connection.sendall(str(error).encode())
                return
            connection.recv(1)  # nothing is sent: it returns when one of the two ends closes
            self._engine.disconnect_server(order.sockets)
