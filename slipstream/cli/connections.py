"""The options that name a server, and connections to it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.cli.arguments import ArgumentContainer, CommandError, Parser, add_verbose
from slipstream.cli.keys import read_api_key
from slipstream.client.connection import (
    Connection,
    GrpcConnection,
    HttpConnection,
    ServerError,
    Tls,
)
from slipstream.server.grpc.protocol import messages

PORTS = {"http": 8000, "grpc": 8001}
# models that every repository has beside the one with a name of its own
_STANDARD_NAMES = ("ensemble", "tensorrt_llm_bls")


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
    host: str = given.url.removeprefix("http://").rstrip("/")
    if ":" in host and given.port is None:
        return host
    return f"{host.split(':')[0]}:{given.port or port}"


def connect(protocol: str, url: str, key: str | None = None) -> Connection:
    """Connect with an API key, by default the one in SLIPSTREAM_API_KEY."""
    used = read_api_key(None) if key is None else key
    if protocol == "http":
        return HttpConnection(url, used)
    return GrpcConnection(messages, url, key=used)


def connect_grpc(
    url: str, tls: Tls | None = None, compression: str | None = None
) -> GrpcConnection:
    return GrpcConnection(messages, url, tls, compression, read_api_key(None))


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
        raise CommandError(
            f"there is no model '{wanted}' to talk to; there are: {', '.join(models) or 'none'}"
        )
    if not own:
        raise CommandError(
            "the server has no model to talk to: none of its models makes text from text"
        )
    return wanted or own[0]
