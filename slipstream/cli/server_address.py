"""The options that Triton CLI's questions to a server share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import connect
from slipstream.client.connection import Connection, ServerError

_PORTS = {"http": 8000, "grpc": 8001}


def add_address(parser: Parser, port: str) -> None:
    parser.add_argument(
        "-u", "--url", default="localhost", help="The server's host, with or without a port."
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="No effect: all there is to say is said."
    )
    parser.add_argument("-p", "--port", type=int, help=f"Default: {port}.")


def add_protocol(parser: Parser) -> None:
    parser.add_argument(
        "-i",
        "--protocol",
        default="grpc",
        choices=["http", "grpc"],
        help="How to ask (default grpc).",
    )


def address_of(given: Namespace, port: int) -> str:
    """HOST:PORT; a port of its own in the address counts where -p is not given."""
    host = given.url.removeprefix("http://").rstrip("/")
    return (
        host if ":" in host and given.port is None else f"{host.split(':')[0]}:{given.port or port}"
    )


@contextmanager
def asking(given: Namespace) -> Iterator[Connection]:
    """A connection by the protocol that was chosen; CommandError for whatever the server refuses."""
    address = address_of(given, _PORTS[given.protocol])
    connection = connect(given.protocol, address)
    try:
        yield connection
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
