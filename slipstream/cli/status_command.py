"""`slipstream status`: whether a server is live and ready, as Triton CLI prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.cli.arguments import Parser
from slipstream.cli.server_address import add_address, add_protocol, asking


def main(arguments: Sequence[str]) -> int:
    parser = Parser("slipstream status", description="Print whether a server is live and ready.")
    add_protocol(parser)
    add_address(parser, "8001, or 8000 with http")
    with asking(parser.parse(arguments)) as connection:
        print(json.dumps(connection.health()))
    return 0
