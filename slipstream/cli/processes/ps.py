"""`slipstream ps`: list the servers that run on this machine."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.cli.log import CONTROL
from slipstream.cli.processes.servers import RunningServer, find_servers

_HEADINGS = ("PROCESS", "UP", "PORTS", "SERVES")


def create_parser() -> Parser:
    return Parser(
        "slipstream ps",
        "List the servers that run on this machine, with their ports and what they serve.",
    )


def run(given: Namespace) -> int:
    rows = [_HEADINGS, *map(_row, find_servers())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        print(line.rstrip())
    return 0


def _row(server: RunningServer) -> tuple[str, ...]:
    ports = " ".join(map(str, server.ports)) or "unknown"
    return str(server.process), duration(server.seconds), ports, CONTROL.sub("", server.serves)


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 5 s, 12m 03s, 3h 20m, 2d 04h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
