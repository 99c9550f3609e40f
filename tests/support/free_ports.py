"""Ports for programs that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# below the ports that the kernel gives to connections
_RANGE = range(10_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Return ports that no program uses now."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def free_range(count: int) -> int:
    """Return the first of this number of ports in a row that no program uses now."""
    while True:
        first = random.choice(_RANGE)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first
