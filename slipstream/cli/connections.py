"""Connections to a server for the commands that take `-i http|grpc` and `-u`."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.cli.keys import read_api_key
from slipstream.client.connection import Connection, GrpcConnection, HttpConnection, Tls
from slipstream.server.grpc.protocol import messages

_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001"}


def add_connection(parser: Parser, default: str = "http") -> None:
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="No effect: everything there is to say is said.",
    )
    parser.add_argument("-u", "--url", help="Default: localhost:8000, or localhost:8001 with grpc.")
    parser.add_argument(
        "-i", "--protocol", default=default, choices=["http", "grpc"], help="How to ask."
    )


def open_connection(given: Namespace) -> Connection:
    return connect(given.protocol, given.url or _DEFAULT_URLS[given.protocol])


def connect(protocol: str, url: str) -> Connection:
    """With the key of a server that needs one, from SLIPSTREAM_API_KEY."""
    return HttpConnection(url, read_api_key(None)) if protocol == "http" else connect_grpc(url)


def connect_grpc(
    url: str, tls: Tls | None = None, compression: str | None = None
) -> GrpcConnection:
    return GrpcConnection(messages, url, tls, compression, read_api_key(None))
