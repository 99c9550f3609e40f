"""`slipstream config -m MODEL`: a served model's configuration as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.cli.arguments import Parser
from slipstream.cli.server_address import add_address, add_protocol, asking


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream config", description="Print a served model's configuration as JSON."
    )
    parser.add_argument("-m", "--model", required=True, help="The model.")
    add_protocol(parser)
    add_address(parser, "8001, or 8000 with http")
    given = parser.parse(arguments)
    with asking(given) as connection:
        print(json.dumps(connection.config(given.model), indent=2))
    return 0
