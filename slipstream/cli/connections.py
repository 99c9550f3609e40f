"""Connections to a server for the commands that take `-i http|grpc` and `-u`."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.client.connection import Connection, GrpcConnection, HttpConnection
from slipstream.server.protocol import messages

_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001"}


def add_connection(parser: Parser, default: str = "http") -> None:
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-u", "--url", help="Default: localhost:8000, or localhost:8001 with grpc.")
    parser.add_argument("-i", "--protocol", default=default, choices=["http", "grpc"])


def open_connection(given: Namespace) -> Connection:
    url = given.url or _DEFAULT_URLS[given.protocol]
    return HttpConnection(url) if given.protocol == "http" else GrpcConnection(messages, url)
