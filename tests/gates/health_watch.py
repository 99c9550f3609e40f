"""Asks a server for its health in a process of its own, so that the clients' work does not count.

    python health_watch.py PORT

It writes the seconds of each answer, one per line, and opens a connection for each.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from pathlib import Path

_PAUSE_SECONDS = 0.05


class HealthWatch:
    """`with HealthWatch(port) as watch:` fills `watch.seconds` when it ends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seconds: list[float] = []

    def __enter__(self) -> HealthWatch:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(self._port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        lines = self._process.communicate()[0].splitlines(keepends=True)
        self.seconds = [float(line) for line in lines if line.endswith("\n")]


def main() -> None:
    port = int(sys.argv[1])
    while True:
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/v2/health/ready")
        response = connection.getresponse()
        response.read()
        connection.close()
        assert response.status in (200, 400), response.status
        print(time.monotonic() - begun, flush=True)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
