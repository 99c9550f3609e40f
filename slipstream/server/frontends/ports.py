"""The ports of a server, bound before anything slow happens. They do not listen yet.

With several front ends each has its own socket at the HTTP port, and the kernel spreads the
connections over them (SO_REUSEPORT). The gRPC library binds its own sockets in the same way. Other
programs, and other servers of this kind, still find that the port is in use.
"""

from __future__ import annotations

import socket
from typing import Protocol


class PortOption(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def open(self) -> bool: ...


class PortError(Exception):
    """A port cannot be used. The text gives the cause and the remedy."""


class Ports:
    def __init__(
        self, http: PortOption, grpc: PortOption, metrics: PortOption, frontends: int = 1
    ) -> None:
        self._bound: list[socket.socket] = []
        self.http: socket.socket | None = None  # None: the port is closed
        self.metrics: socket.socket | None = None
        self.others: list[socket.socket] = []  # the HTTP port of each other front end
        self.grpc_number = grpc.number
        try:
            if http.open:
                self.http, *self.others = self._bind_all(http, "--http-port", frontends)
            if metrics.open:
                self.metrics = self._bind(metrics, metrics.number, "--metrics-port")
            if grpc.open:
                self._check_grpc(grpc, frontends)
        except PortError:
            self.close()
            raise

    def _check_grpc(self, port: PortOption, frontends: int) -> None:
        """Find out early whether the gRPC library can bind the port.

        With several front ends the number stays taken, so that each of them can bind it later.
        """
        bound = self._bind_all(port, "--grpc-port", 1, shared=frontends > 1)[0]
        if frontends > 1:
            self.grpc_number = bound.getsockname()[1]
        else:
            bound.close()

    def _bind_all(
        self, port: PortOption, option: str, count: int, shared: bool = False
    ) -> list[socket.socket]:
        """Return `count` sockets at a port that no other program uses."""
        first = self._bind(port, port.number, option)
        if count == 1 and not shared:
            return [first]
        number = first.getsockname()[1]
        first.close()  # it has shown that no other program uses the port
        return [self._bind(port, number, option, shared=True) for _ in range(count)]

    def _bind(
        self, port: PortOption, number: int, option: str, shared: bool = False
    ) -> socket.socket:
        family = socket.AF_INET6 if ":" in port.address else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        self._bound.append(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind((port.address, number))
        except OverflowError as error:
            raise PortError(f"{option} must be 0 to 65535, got {number}") from error
        except OSError as error:
            remedy = f"stop what uses it, or choose another port with {option}"
            raise PortError(
                f"cannot use {port.address}:{number}: {error.strerror}; {remedy}"
            ) from error
        return bound

    def close(self) -> None:
        for bound in self._bound:
            bound.close()
