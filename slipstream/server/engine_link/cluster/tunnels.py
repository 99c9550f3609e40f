"""Tunnels from the front ends of the server to an engine on another machine.

A front end binds a Unix socket for each engine, as for one on its own machine. A tunnel connects to
it, and listens for the engine at a TCP port with the cluster key. A thread passes the frames on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from slipstream.server.engine_link.cluster.calls import Calls
from slipstream.server.engine_link.cluster.key import ClusterKey, Gate
from slipstream.server.engine_link.link import configure

_FRAMES_AT_ONCE = 100  # of one socket, before the others have their turn

_Socket = zmq.Socket[bytes]


class Tunnels:
    """The tunnels to one engine process, one for each front end."""

    def __init__(self, address: str, key: ClusterKey, paths: Sequence[Path]) -> None:
        """address: IP address of this machine. paths: of the sockets that front ends bind"""
        self._address = address
        self._key = key
        self._context = zmq.Context()
        self._gate = Gate(self._context, key)
        self._calls = Calls()
        self._poller = zmq.Poller()
        self._poller.register(self._calls.descriptor, zmq.POLLIN)
        self._others: dict[_Socket, _Socket] = {}  # both ends of each tunnel
        self._by_path: dict[Path, _Socket] = {}  # the end at a front end
        self._closed = False
        self.endpoints = [self._open(path) for path in paths]
        self._thread = threading.Thread(target=self._run, name="tunnels", daemon=True)
        self._thread.start()

    def replace(self, before: Path, path: Path) -> str:
        """Close the tunnel at a path, and open one at another. Return its endpoint."""
        opened: list[str] = []
        done = threading.Event()

        def swap() -> None:
            self._close(self._by_path.pop(before))
            opened.append(self._open(path))
            done.set()

        self._calls.add(swap)
        done.wait()
        return opened[0]

    def close(self) -> None:
        """Close all tunnels."""
        if not self._closed:
            self._closed = True
            self._calls.add(lambda: None)
            self._thread.join()

    # -- all below runs in the thread, after the start

    def _open(self, path: Path) -> str:
        """Open a tunnel and return where it listens."""
        here = self._context.socket(zmq.PAIR)
        there = self._context.socket(zmq.PAIR)
        for socket in (here, there):
            configure(socket, linger_ms=0)
            self._poller.register(socket, zmq.POLLIN)
        here.connect(f"ipc://{path}")
        self._key.listen(there)
        there.bind(f"tcp://{self._address}:*")
        self._others |= {here: there, there: here}
        self._by_path[path] = here
        return there.get_string(zmq.LAST_ENDPOINT)

    def _close(self, here: _Socket) -> None:
        for socket in (here, self._others[here]):
            del self._others[socket]
            self._poller.unregister(socket)
            socket.close()

    def _run(self) -> None:
        while not self._closed:
            ready = dict(self._poller.poll())
            self._calls.run_waiting()
            for source, other in list(self._others.items()):
                if source in ready:
                    _pass_on(source, other)
        for here in self._by_path.values():
            self._close(here)
        self._gate.close()
        self._context.term()
        self._calls.close()


def _pass_on(source: _Socket, other: _Socket) -> None:
    """Pass on the frames that wait, up to a number of them."""
    for _ in range(_FRAMES_AT_ONCE):
        try:
            frame = source.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        # An engine that has ended takes nothing; its requests fail when its exit is noticed.
        with suppress(zmq.Again):
            other.send(frame, zmq.NOBLOCK)
