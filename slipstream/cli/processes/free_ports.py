"""The check of the ports of a new server, before it fetches a model or loads anything."""

from __future__ import annotations

import errno
import os
import socket

from slipstream.cli.arguments import CommandError
from slipstream.cli.log import CONTROL
from slipstream.cli.processes.servers import find_servers


def check_free(address: str, number: int, option: str) -> None:
    """Raise CommandError if a port is in use. The error names the server of this machine there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, number))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                return  # the server reports it
        else:
            return
    users = [server for server in find_servers() if number in server.ports and server.own]
    remedy = "stop what uses it"
    if users:
        serves = CONTROL.sub("", users[0].serves)
        process = users[0].process
        remedy = f"process {process} serves {serves} there; slipstream stop {process} ends it"
    raise CommandError(
        f"cannot use {address}:{number}: {os.strerror(errno.EADDRINUSE)}; {remedy}, or choose "
        f"another port with {option}"
    )
