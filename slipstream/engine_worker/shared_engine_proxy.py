"""The process that a server starts in place of an engine process when the engine is in another one.

    python -m slipstream.engine_worker.shared_engine_proxy SOCKET ORDER

ORDER is the JSON form of `link.StartOrder`. The process at SOCKET connects its engine to the
server. This program ends when the server disconnects from the engine or the engine ends. It imports
little, and its messages go to the server's log.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import socket
import sys

from slipstream.server.log.parent_death import die_with


def main(place: str, order: str) -> int:
    """Send the order and wait for the end of the connection. Returns the exit code."""
    if not die_with(json.loads(order)["parent_process"]):
        return 1
    # the server decides when it disconnects from the engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(place)
            connection.sendall(order.encode() + b"\n")
            reason = connection.recv(4096)
        except OSError as error:
            reason = f"the process with the engine cannot be reached: {error}".encode()
    if not reason:
        return 0
    print(reason.decode(errors="replace"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
