"""What an error about a wrong address says: which servers run on this machine, at which ports."""

from __future__ import annotations

import httpx

from slipstream.cli.log import CONTROL
from slipstream.cli.processes.servers import RunningServer, find_servers

THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_SECONDS = 0.5  # longest wait for the answer of a port
_IS_METRICS = (httpx.codes.OK, httpx.codes.UNAUTHORIZED)


def describe_others(url: str, protocol: str) -> str:
    """Return the end of an error: the ports of this user's servers, if the address is this
    machine's. Empty if none runs.

    protocol: that of the port that is missing, `http`, `grpc` or `metrics`
    """
    host, _, _ = url.rpartition("//")[2].rpartition(":")
    if host not in THIS_MACHINE:
        return ""
    found = [
        text
        for server in find_servers()
        if server.own and (text := _describe(server, host, protocol))
    ]
    return f"; running here: {'; '.join(found)}" if found else ""


def _describe(server: RunningServer, host: str, protocol: str) -> str:
    serves = CONTROL.sub("", server.serves)
    ports = [port for port in server.ports if kind_of(host, port) == protocol]
    if ports:
        return f"{serves} (-p {ports[0]})"
    known = " ".join(map(str, server.ports))
    return f"{serves} (ports {known})" if known else ""


def kind_of(host: str, port: int) -> str:
    """Return what listens at a port of a server: `http`, `grpc` or `metrics`; empty: neither."""
    place = f"http://{host}:{port}"
    try:
        answer = httpx.get(f"{place}/v2", timeout=_SECONDS, trust_env=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED or answer.content[:1] == b"{":
            return "http"
        answer = httpx.get(f"{place}/metrics", timeout=_SECONDS, trust_env=False)
    except httpx.RemoteProtocolError:
        return "grpc"
    except httpx.HTTPError:
        return ""  # it answers at another address, or not in time
    return "metrics" if answer.status_code in _IS_METRICS else ""
