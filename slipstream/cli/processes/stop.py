"""`slipstream stop`: stop a server of this machine, as Ctrl-C in its terminal does."""

from __future__ import annotations

import os
import select
import signal
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from slipstream.cli.arguments import CommandError, Parser, at_least
from slipstream.cli.log import log
from slipstream.cli.processes.servers import RunningServer, find_servers

_SECONDS = 40.0  # a server gives running requests 30 s by default


def create_parser() -> Parser:
    parser = Parser(
        "slipstream stop",
        "Stop a server of this machine. It finishes its running requests first.",
    )
    parser.add_argument(
        "process",
        nargs="?",
        metavar="PROCESS",
        help="Process of the server, as `slipstream ps` lists it, or all (default: the only one). "
        "Servers of other users, or with another SLIPSTREAM_HOME, must be named.",
    )
    parser.add_argument(
        "-p", "--port", type=int, help="Port of the server, instead of its process."
    )
    parser.add_argument(
        "--timeout",
        type=at_least(0),
        default=_SECONDS,
        metavar="SECONDS",
        help="Wait this long for the server to end.",
    )
    return parser


def run(given: Namespace) -> int:
    chosen = choose_servers(find_servers(), given.process, given.port)
    deadline = time.monotonic() + given.timeout
    ends = []
    try:
        for server in chosen:
            ends.append((server, _open(server)))
        for server, end in ends:
            signal.pidfd_send_signal(end, signal.SIGTERM)
            log("INFO", f"Stopping {_describe(server)}")
        for server, end in ends:
            if not select.select([end], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise CommandError(
                    f"process {server.process} has not ended after {given.timeout:g} s: it "
                    f"finishes its requests; to end it at once: kill -KILL {server.process}"
                )
    finally:
        for _, end in ends:
            with suppress(OSError):
                os.close(end)
    return 0


def choose_servers(
    servers: Sequence[RunningServer], process: str | None, port: int | None
) -> list[RunningServer]:
    """Return the servers to stop. Raises CommandError that names what there is."""
    listed = "; ".join(map(_describe, servers)) or "none"
    if not servers:
        raise CommandError("no server runs on this machine")
    if process == "all" or (process is None and port is None):
        return _choose_own(servers, listed, every=process == "all")
    found = [
        server
        for server in servers
        if process in (None, str(server.process)) and (port is None or port in server.ports)
    ]
    if not found:
        wanted = f"process {process}" if process is not None else f"port {port}"
        raise CommandError(f"no server has {wanted}; there are: {listed}")
    return found


def _choose_own(servers: Sequence[RunningServer], listed: str, every: bool) -> list[RunningServer]:
    """Return the server of this user and SLIPSTREAM_HOME, if there is one; or every such server."""
    own = [server for server in servers if server.own]
    if own and (every or len(own) == 1):
        return own
    example = f"name one, as in: slipstream stop {(own or servers)[0].process}"
    if own:
        raise CommandError(f"{len(own)} servers run: {'; '.join(map(_describe, own))}; {example}")
    raise CommandError(
        f"no server of this user and SLIPSTREAM_HOME runs; others run: {listed}; {example}"
    )


def _describe(server: RunningServer) -> str:
    ports = f", ports {' '.join(map(str, server.ports))}" if server.ports else ""
    return f"process {server.process} ({server.serves}{ports})"


def _open(server: RunningServer) -> int:
    """Return a descriptor of the process, which stays that of this process after its end."""
    try:
        return os.pidfd_open(server.process)
    except ProcessLookupError:
        raise CommandError(f"process {server.process} has ended meanwhile") from None
