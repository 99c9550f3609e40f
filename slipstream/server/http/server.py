"""One listening HTTP port."""

from __future__ import annotations

import asyncio
import logging
import socket

from slipstream.server.http.connection import ConnectionLimits, ConnectionSet, HttpConnection
from slipstream.server.http.exchange import Handler
from slipstream.server.http.tls import HANDSHAKE_SECONDS, SHUTDOWN_SECONDS, create_tls_context
from slipstream.server.kserve.certificates import CertificateFiles

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that the kernel accepts before this process does
_POLL_SECONDS = 0.01


class HttpServer:
    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits | None = None,
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`certificate`: for TLS; None: connections are not encrypted."""
        self._handler = handler
        self._certificate = certificate
        self._limits = limits or ConnectionLimits()
        self._members = ConnectionSet()
        self._listener: asyncio.Server | None = None

    async def open(self, listening: socket.socket) -> None:
        """Accept connections from this socket."""
        loop = asyncio.get_running_loop()
        if self._certificate is None:
            self._listener = await loop.create_server(
                self._create_connection, sock=listening, backlog=_BACKLOG
            )
            return
        self._listener = await loop.create_server(
            self._create_connection,
            sock=listening,
            backlog=_BACKLOG,
            ssl=create_tls_context(self._certificate),
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted or made."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(self._create_connection, connection)

    def _create_connection(self) -> HttpConnection:
        return HttpConnection(self._handler, self._members, self._limits)

    async def close(self, seconds: float) -> None:
        """Stop listening, and give the responses that are being sent this long to end."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._members.connections):
            connection.shut_down()
        try:
            async with asyncio.timeout(seconds):
                while self._members.connections or self._members.tasks:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            count = len(self._members.tasks)
            logger.warning("the HTTP server stops and cancels %d unfinished requests", count)
            for task in self._members.tasks:
                task.cancel()
