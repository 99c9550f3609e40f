"""`slipstream status`: whether a server is live and ready, as Triton CLI prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.cli.arguments import Parser
from slipstream.cli.server_address import add_address, get


def main(arguments: Sequence[str]) -> int:
    parser = Parser("slipstream status", description="Print whether a server is live and ready.")
    add_address(parser, "8000")
    given = parser.parse(arguments)
    status = {word: get(given, 8000, f"/v2/health/{word}").is_success for word in ("live", "ready")}
    print(json.dumps(status))
    return 0
