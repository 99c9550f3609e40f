"""The interface of a gRPC server, and the choice between its two implementations.

Handlers run on the event loop and take and return bytes. `core_transport` drives gRPC's C core
directly: it serves up to twice as many small requests as `grpc.aio`. It uses private names of
grpcio, so `aio_transport`, on the public `grpc.aio`, takes its place where those names may differ.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import grpc

logger = logging.getLogger(__name__)

Transport = Literal["core", "aio"]
INTERNAL = "internal error, the server's log has the details"
# The releases of grpcio whose C core was tested: from the first up to, not including, the second.
TESTED_VERSIONS = ((1, 67), (1, 90))


class Status(Exception):
    """Ends a call with a status in place of its response."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ClientGone(Exception):
    """The client has left; the call is about to be cancelled."""


class Call(Protocol):
    """A client's call. Its handler is cancelled when the client leaves or its deadline passes."""

    metadata: Sequence[tuple[str, str | bytes]]

    def peer(self) -> str:
        """Return the client's end of the connection."""
        ...


class StreamCall(Call, Protocol):
    """A call with any number of messages both ways. Iterate over it for those of the client."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def __anext__(self) -> Awaitable[bytes]: ...

    async def write(self, message: bytes) -> None:
        """Send a message and wait until the next may follow. Raises ClientGone."""
        ...


@dataclass(frozen=True)
class Unary:
    answer: Callable[[bytes, Call], Awaitable[bytes]]


@dataclass(frozen=True)
class Streaming:
    run: Callable[[StreamCall], Awaitable[None]]


Handler = Unary | Streaming


class GrpcServer(Protocol):
    @property
    def running(self) -> Collection[object]:
        """The calls whose handlers run."""
        ...

    def add_insecure_port(self, address: str) -> int:
        """Return the port. Raises RuntimeError where the address cannot be bound."""
        ...

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, and cancel those that still run after `grace` seconds."""
        ...


def create_server(
    handlers: Mapping[str, Handler],
    arguments: Sequence[tuple[str, int]],
    transport: Transport = "core",
) -> GrpcServer:
    """Return a server of these handlers, by path: "/package.Service/Method".

    `arguments` are channel arguments of gRPC. The transport "core" falls back to "aio" where this
    version of grpcio was not tested or lacks a name that it needs.
    """
    if transport == "core":
        problem = core_problem(grpc.__version__)
        if not problem:
            from slipstream.server.grpc.core_transport import CoreServer

            return CoreServer(handlers, arguments)
        logger.warning("gRPC runs on grpc.aio, which is slower: %s", problem)
    from slipstream.server.grpc.aio_transport import AioServer

    return AioServer(handlers, arguments)


def core_problem(version: str) -> str:
    """Return why `core_transport` cannot be used with this version of grpcio; "" if it can."""
    first, end = TESTED_VERSIONS
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not first <= number < end:
        tested = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        return f"grpcio {version} is not among the tested releases {tested}"
    try:
        import slipstream.server.grpc.core_transport  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"grpcio {version} lacks a name: {error}"
    return ""
