"""`slipstream config -m MODEL`: a served model's configuration as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.server_address import add_address, get


def main(arguments: Sequence[str]) -> int:
    parser = Parser("slipstream config", description="Print a served model's configuration as JSON.")
    parser.add_argument("-m", "--model", required=True)
    add_address(parser, "8000")
    given = parser.parse(arguments)
    response = get(given, 8000, f"/v2/models/{given.model}/config")
    document = response.json()
    if not response.is_success:
        raise CommandError(str(document.get("error", f"the server answered {response.status_code}")))
    print(json.dumps(document, indent=2))
    return 0
