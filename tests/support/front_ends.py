"""The processes of a server with several front ends, and connections to each of them.

The kernel chooses the process that gets a connection. `connect_to_each` connects until every
process has one, and finds the owner of each in /proc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import tritonclient.grpc as grpcclient
from tiny_server import children_of, command_of

_MODULE = "slipstream.server.frontends.process"
_ESTABLISHED = "01"
_TRIES = 400
# by default httpx closes a connection after five idle seconds, and the next may reach another process
KEPT = httpx.Limits(keepalive_expiry=None)


def secondaries(primary: int) -> list[int]:
    """Return the process ids of the secondary front ends, oldest first."""
    return [found for found in children_of(primary) if _MODULE in command_of(found)]


def front_ends(primary: int) -> list[int]:
    """Return the process ids of all front ends, the primary one first."""
    return [primary, *secondaries(primary)]


def http_clients(primary: int, port: int) -> dict[int, httpx.Client]:
    """Return a client for each front end, by process id, each with a connection that is kept."""

    def connect() -> tuple[httpx.Client, int]:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=KEPT)
        stream = client.get("/v2/health/live").extensions["network_stream"]
        return client, stream.get_extra_info("client_addr")[1]

    return _connect_to_each(front_ends(primary), port, connect)


def grpc_clients(primary: int, port: int) -> dict[int, grpcclient.InferenceServerClient]:
    """Return a client for each front end, by process id."""

    def connect() -> tuple[grpcclient.InferenceServerClient, int]:
        before = _own_ports(port)
        # one connection per client, not one that all clients share
        own = [("grpc.use_local_subchannel_pool", 1)]
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}", channel_args=own)
        assert client.is_server_live()
        (new,) = _own_ports(port) - before
        return client, new

    return _connect_to_each(front_ends(primary), port, connect)


def _connect_to_each(processes: list[int], port: int, connect: Callable) -> dict:
    found: dict = {}
    for _ in range(_TRIES):
        client, client_port = connect()
        owner = _owner(processes, port, client_port)
        if owner in found:
            client.close()
        else:
            found[owner] = client
        if len(found) == len(processes):
            return {process: found[process] for process in processes}
    raise AssertionError(f"only {len(found)} of {len(processes)} front ends got a connection")


def _owner(processes: list[int], port: int, client_port: int) -> int:
    """Return the process that has the server's end of a connection."""
    (inode,) = (row[2] for row in _connections() if row[:2] == (port, client_port))
    (owner,) = (process for process in processes if inode in _inodes(process))
    return owner


def _own_ports(server_port: int) -> set[int]:
    """Return the ports of this process's connections to a server."""
    own = _inodes(os.getpid())
    return {
        local for local, remote, inode in _connections() if remote == server_port and inode in own
    }


def _connections() -> list[tuple[int, int, str]]:
    """Return local port, remote port and inode of all connections."""
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _ESTABLISHED:
                ports = [int(place.rpartition(":")[2], 16) for place in words[1:3]]
                rows.append((ports[0], ports[1], words[9]))
    return rows


def _inodes(process: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(match.group(1))
    return found
