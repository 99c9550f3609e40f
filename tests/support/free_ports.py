"""Ports for programs that cannot choose one themselves."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return ports that no program uses now."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
