"""The options that name a server, and connections to it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.cli.arguments import (
    ArgumentContainer,
    CommandError,
    Parser,
    UsageError,
    add_verbose,
)
from slipstream.cli.keys import read_api_key
from slipstream.cli.processes.other_ports import describe_others
from slipstream.client.address import AddressError, read_address
from slipstream.client.connection import (
    Connection,
    GrpcConnection,
    HttpConnection,
    ServerError,
    Tls,
    Unreached,
)
from slipstream.repository.templates import BLS_TEMPLATE, ENSEMBLE, helpers_among
from slipstream.server.grpc.protocol import messages

PORTS = {"http": 8000, "grpc": 8001}
# models that come after those with a name of their own
_STANDARD_NAMES = (ENSEMBLE, BLS_TEMPLATE)


def add_connection(parser: Parser, protocol: str = "http") -> None:
    """Add `-u HOST:PORT` and `-i`, as the tutorials' scripts have them."""
    parser.add_argument(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="Address of the server (default: localhost:8000, or localhost:8001 with -i grpc).",
    )
    add_protocol(parser, protocol)
    add_verbose(parser)


def add_protocol(parser: ArgumentContainer, default: str) -> None:
    parser.add_argument(
        "-i",
        "--protocol",
        default=default,
        choices=["http", "grpc"],
        help="Protocol of the requests.",
    )


def add_address(parser: Parser, ports: str) -> None:
    """Add `-u HOST` and `-p PORT`, as Triton CLI has them. `ports` describes the default port."""
    parser.add_argument(
        "-u",
        "--url",
        default="localhost",
        metavar="HOST",
        help="Host of the server, optionally with :PORT.",
    )
    parser.add_argument("-p", "--port", type=int, help=f"Port of the server (default: {ports}).")
    add_verbose(parser)


def add_api_key(parser: Parser) -> None:
    parser.add_argument(
        "--api-key",
        type=Path,
        metavar="FILE",
        help="File that holds the server's API key (default: the key in SLIPSTREAM_API_KEY).",
    )


def server_address(given: Namespace, port: int) -> str:
    """Return HOST:PORT. A port in the address counts if -p is not given."""
    address = checked_address(given.url, port)
    if given.port is None:
        return address
    return checked_address(f"{address.rpartition(':')[0]}:{given.port}", port)


def checked_address(text: str, port: int) -> str:
    """Return HOST:PORT of an address of the command line. port: if it has none"""
    try:
        return read_address(text, port)
    except AddressError as error:
        raise UsageError(str(error)) from error


def connect(protocol: str, url: str, key: str | None = None) -> Connection:
    """Connect with an API key, by default the one in SLIPSTREAM_API_KEY."""
    used = read_api_key(None) if key is None else key
    address = checked_address(url, PORTS[protocol])
    if protocol == "http":
        return HttpConnection(address, used)
    return GrpcConnection(messages, address, key=used)


def connect_grpc(
    url: str, tls: Tls | None = None, compression: str | None = None
) -> GrpcConnection:
    address = checked_address(url, PORTS["grpc"])
    return GrpcConnection(messages, address, tls, compression, read_api_key(None))


@contextmanager
def connected(given: Namespace) -> Iterator[Connection]:
    """Connect to the server of `-i` and `-u`. An error of the server becomes a CommandError."""
    url = given.url
    if "port" in given:
        url = server_address(given, PORTS[given.protocol])
    connection = connect(given.protocol, url or f"localhost:{PORTS[given.protocol]}")
    with closing_connection(connection):
        yield connection


@contextmanager
def closing_connection(connection: Connection) -> Iterator[None]:
    """Close the connection at the end. An error of the server becomes a CommandError."""
    try:
        yield
    except Unreached as error:
        protocol = "http" if isinstance(connection, HttpConnection) else "grpc"
        others = describe_others(connection.url, protocol)
        raise CommandError(f"{error}{others}") from error
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()


def choose_model(models: dict[str, str], wanted: str | None) -> str:
    """Return the wanted model, else the first that is no adapter and has a name of its own."""
    own = sorted(
        (name for name, parent in models.items() if not parent),
        key=lambda name: name in _STANDARD_NAMES,
    )
    if wanted is not None and wanted not in models:
        names = [name for name in models if name not in helpers_among(own)]
        raise CommandError(f"there is no model '{wanted}' to talk to; {_there_are(names)}")
    if not own:
        raise CommandError(
            "the server has no model to talk to: none of its models makes text from text"
        )
    return wanted or own[0]


def read_config(connection: Connection, model: str) -> dict[str, Any]:
    """Return the configuration of a served model. The error for an unknown one lists the models."""
    try:
        return connection.config(model)
    except Unreached:
        raise
    except ServerError as error:
        names = [found["name"] for found in connection.index()]
        if model in names:
            raise
        helpers = helpers_among(names)
        own = _there_are([name for name in names if name not in helpers])
        raise CommandError(f"{error}; {own}") from error


def _there_are(names: Sequence[str]) -> str:
    return f"there are: {', '.join(names) or 'none'}"
