"""The options that Triton CLI's questions to a server share."""

from __future__ import annotations

from argparse import Namespace

import httpx

from slipstream.cli.arguments import CommandError, Parser


def add_address(parser: Parser, port: str) -> None:
    parser.add_argument("-u", "--url", default="localhost", help="The server's host.")
    parser.add_argument("-p", "--port", type=int, help=f"Default: {port}.")
    parser.add_argument("-i", "--protocol", default="http", choices=["http", "grpc"], help="No effect: HTTP is used.")


def get(given: Namespace, port: int, path: str) -> httpx.Response:
    """A GET to the server; CommandError where nobody answers."""
    host = given.url.removeprefix("http://")
    address = host if ":" in host and given.port is None else f"{host.split(':')[0]}:{given.port or port}"
    try:
        return httpx.get(f"http://{address}{path}", timeout=10.0, trust_env=False)
    except httpx.HTTPError as error:
        raise CommandError(f"no server answers at {address} ({error}); start one with: slipstream start") from error
