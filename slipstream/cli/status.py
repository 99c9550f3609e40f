"""`slipstream status`: what a server is and serves; as JSON whether it is live and ready."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slipstream.cli import metrics
from slipstream.cli.arguments import Parser, UsageError
from slipstream.cli.connections import (
    PORTS,
    add_address,
    add_protocol,
    connected,
    read_config,
    server_address,
)
from slipstream.cli.log import CONTROL, program
from slipstream.cli.processes.other_ports import THIS_MACHINE
from slipstream.cli.processes.ps import duration
from slipstream.cli.processes.servers import find_servers
from slipstream.client.connection import Connection, HttpConnection, ServerError
from slipstream.repository.templates import helpers_among

READY = "READY"
_HEADINGS = ("MODEL", "VERSION", "STATE", "REASON")


def create_parser() -> Parser:
    parser = Parser(
        "slipstream status",
        "Print a server's version, how long it has run, and its models with their states.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print only whether it is live and ready, as JSON."
    )
    parser.add_argument(
        "--metrics", action="store_true", help="Print its metrics as JSON (default port: 8002)."
    )
    parser.add_argument(
        "--config", metavar="MODEL", help="Print the configuration of a model as JSON."
    )
    add_protocol(parser, "grpc" if program() == "triton" else "http")
    add_address(parser, "8000, or 8001 with -i grpc")
    return parser


def run(given: Namespace) -> int:
    if given.metrics + given.json + (given.config is not None) > 1:
        raise UsageError("--json, --metrics and --config exclude each other: give one")
    if given.metrics:
        return metrics.run(given)
    with connected(given) as connection:
        if given.config is not None:
            print(json.dumps(read_config(connection, given.config), indent=2))
        elif given.json or program() == "triton":
            print(json.dumps(connection.health()))
        else:
            address = server_address(given, PORTS[given.protocol])
            print("\n".join(_describe(connection, address)))
    return 0


def _describe(connection: Connection, address: str) -> list[str]:
    state = "ready" if connection.health()["ready"] else "not ready"
    models = connection.index()
    helpers = helpers_among([model["name"] for model in models])
    # a helper that is not ready is why its model does not answer
    hidden = [one["name"] for one in models if one["name"] in helpers and one.get("state") == READY]
    rows = [_row(model) for model in models if model["name"] not in hidden]
    rows.insert(0, list(_HEADINGS))
    if all(row[-1] == "-" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{_version(connection)} at {address}: {state}{_uptime(address)}"]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("   ".join(cells).rstrip())
    if hidden:
        lines.append(f"Ready helper models of these: {CONTROL.sub('', ', '.join(hidden))}")
    return lines


def _row(model: Mapping[str, Any]) -> list[str]:
    fields = (model["name"], *(model.get(key) or "-" for key in ("version", "state", "reason")))
    return [CONTROL.sub("", str(field)) for field in fields]


def _version(connection: Connection) -> str:
    """Return name and version of the server. Only HTTP tells Slipstream's own version."""
    if isinstance(connection, HttpConnection):
        try:
            info = connection.get("/openapi.json")["info"]
            return f"slipstream {info['version']}"
        except (ServerError, KeyError, TypeError):
            pass  # another server of this protocol
    metadata = connection.metadata()
    return f"{metadata.get('name')} {metadata.get('version')}"


def _uptime(address: str) -> str:
    """Return how long a server of this machine has run; nothing for another machine's."""
    host, _, port = address.rpartition(":")
    if host not in THIS_MACHINE:
        return ""
    for server in find_servers():
        if int(port) in server.ports:
            return f", up {duration(server.seconds)} (process {server.process})"
    return ""
