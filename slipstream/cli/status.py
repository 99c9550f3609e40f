"""`slipstream status`: print whether a server is live and ready, as Triton CLI does."""

from __future__ import annotations

import json
from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.cli.connections import add_address, add_protocol, connected


def create_parser() -> Parser:
    parser = Parser("slipstream status", "Print whether a server is live and ready, as JSON.")
    add_protocol(parser, "grpc")
    add_address(parser, "8001, or 8000 with -i http")
    return parser


def run(given: Namespace) -> int:
    with connected(given) as connection:
        print(json.dumps(connection.health()))
    return 0
