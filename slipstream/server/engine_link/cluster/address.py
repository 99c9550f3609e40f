"""Where rank 0 of a launcher listens for the other machines, and the interface that leads to it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from slipstream.server.engine_link.launched import Launched

PORT_VARIABLE = "SLIPSTREAM_CLUSTER_PORT"
_FIRST_PORT = 20000
_PORTS = 20000
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ANY_PORT = 9  # no packet is sent there


class AddressError(ValueError):
    """The leader's address is not known. The text says what to set."""


class LeaderAddress(NamedTuple):
    host: str  # name or IP address
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def leader_address(
    launched: Launched, environment: Mapping[str, str] = os.environ
) -> LeaderAddress:
    """Return where rank 0 listens. All processes of a launcher find the same."""
    return LeaderAddress(_leader_host(launched, environment), _leader_port(launched, environment))


def _leader_host(launched: Launched, environment: Mapping[str, str]) -> str:
    if host := environment.get("MASTER_ADDR", "").strip():
        return host
    host = ""
    if launched.launcher == "srun":
        first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
        host = first if resolves(first) else environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    elif launched.launcher == "mpirun":
        host = _mpirun_host(environment.get("OMPI_MCA_orte_hnp_uri", ""))
    elif launched.launcher == "LeaderWorkerSet":
        host = environment.get("LWS_LEADER_ADDRESS", "")
    if not host:
        raise AddressError(
            f"{launched.launcher} does not say where rank 0 runs: set MASTER_ADDR to the address "
            "of its machine, in all processes"
        )
    return host


def _leader_port(launched: Launched, environment: Mapping[str, str]) -> int:
    if given := environment.get(PORT_VARIABLE, ""):
        return _port(given, PORT_VARIABLE)
    if given := environment.get("MASTER_PORT", ""):
        # torchrun itself listens at its port
        return _port(given, "MASTER_PORT") + (launched.launcher == "torchrun")
    job = environment.get("SLURM_JOB_ID") or environment.get("OMPI_MCA_ess_base_jobid") or "0"
    return _FIRST_PORT + (int(job) % _PORTS if job.isdecimal() else 0)


def _port(text: str, variable: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16 - 1:
        raise AddressError(f"{variable} must be a port from 1 to 65534, not '{text}'")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm's: n001 of "n[001-004,7],m1"."""
    found = re.match(r"([^,\[]*)(?:\[([^,\]-]*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _mpirun_host(uri: str) -> str:
    """Return the first address of "1234.0;tcp://10.0.0.5,172.17.0.1:43417"."""
    found = re.search(r"tcp://([^,:;/]+)", uri)
    return found[1] if found else ""


def resolves(host: str) -> bool:
    try:
        return bool(host and resolve(host))
    except AddressError:
        return False


def resolve(host: str) -> str:
    """Return the IPv4 address of a host. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"the address of rank 0, {host}, does not resolve: {error}") from error
    return str(found[0][4][0])


def route_interface(leader: str) -> str:
    """Return the name of the interface that leads to an IP address, such as "eth0"."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((leader, _ANY_PORT))
        own: str = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _interface_address(probe, name) == own:
                return name
    # of the loopback interface, only the first address is reported
    return "lo" if own.startswith("127.") else ""


def _interface_address(probe: socket.socket, name: str) -> str:
    """Return the first IPv4 address of an interface; empty: it has none."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _INTERFACE_ADDRESS, request)
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
