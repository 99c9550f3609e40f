"""The server of one replica: a process of its own with private ports, which ends with the replica.

Run as a module it is that process: PARENT is the process to end with, FLAGS are tritonserver's.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from slipstream.cli.compat import tritonserver
from slipstream.server.engine_link.child import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    child_environment,
)
from slipstream.server.engine_link.cluster.address import PORT_VARIABLE
from slipstream.server.engine_link.cluster.key import (
    CLUSTER_KEY_FILE_VARIABLE,
    CLUSTER_KEY_VARIABLE,
)
from slipstream.server.engine_link.launched import RAY
from slipstream.server.engine_link.link import describe_exit
from slipstream.server.log.parent_death import die_with

_STARTED = re.compile(r"Started (HTTPService|Metrics Service) at 127\.0\.0\.1:(\d+)")
_POLL_SECONDS = 0.05
_KEY_BYTES = 32  # of the cluster key of a replica
_KEPT_LINES = 20  # of the log, for the reason of a failed start
_KILL_SECONDS = 10.0  # added to the exit timeout before the process is killed
# The ports are private, as requests come through Ray. The log says which they are.
_OWN_FLAGS = (
    "--http-address=127.0.0.1",
    "--http-port=0",
    "--metrics-address=127.0.0.1",
    "--metrics-port=0",
    "--allow-grpc=false",
    "--log-info=true",
    "--log-file=",
)


class ServerFailed(Exception):
    """The server did not start, or has ended."""


class ServerProcess:
    def __init__(
        self,
        flags: Sequence[str],
        exit_timeout_seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start a server. `flags`: those of tritonserver, except for ports, log and exit timeout.
        `variables`: of its place among several nodes; None: it is on one node.

        The thread that calls this must live as long as the replica: the kernel ends the server
        with it.
        """
        self._exit_timeout = exit_timeout_seconds
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ports: dict[str, int] = {}
        own = [*_OWN_FLAGS, f"--exit-timeout-secs={exit_timeout_seconds:g}"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), *flags, *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**_environment(), **(variables or launch_variables(0, 1))},
            start_new_session=True,
        )
        threading.Thread(target=self._pass_on_log, daemon=True).start()

    def _pass_on_log(self) -> None:
        """Write what the server logs to the replica's log, and find its ports in it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stderr.write(line)
            self._last_lines.append(line)
            if found := _STARTED.search(line):
                self._ports[found[1]] = int(found[2])

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        """The address of the HTTP port."""
        return f"http://127.0.0.1:{self._ports['HTTPService']}"

    @property
    def metrics_url(self) -> str:
        """The address of the metrics port, whose health probes need no key."""
        return f"http://127.0.0.1:{self._ports['Metrics Service']}"

    def wait_started(self, seconds: float) -> None:
        """Wait until the models are served. Raise ServerFailed if they are not within this time."""
        deadline = time.monotonic() + seconds
        while len(self._ports) < 2:
            self.check_running()
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise ServerFailed(f"the server did not start within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def check_running(self) -> None:
        """Raise ServerFailed with the last lines of the log if the process has ended."""
        code = self._process.poll()
        if code is not None:
            lines = "".join(self._last_lines)
            raise ServerFailed(f"the server ended ({describe_exit(code)}); its log:\n{lines}")

    async def stop(self) -> None:
        """Let the server finish its requests and end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._exit_timeout + _KILL_SECONDS):
                while self._process.poll() is None:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            self._process.kill()
            self._process.wait()


def launch_variables(rank: int, nodes: int, job: str = "") -> dict[str, str]:
    """Return the variables of one of the processes of a replica, one for each node. They come
    before those of a launcher that has started Ray, such as srun.
    """
    return {RAY.rank: str(rank), RAY.size: str(nodes), RAY.job: job}


def meeting_variables(address: str) -> dict[str, str]:
    """Return the variables by which the processes of a replica on several nodes meet, and a key
    that no others know. address: of the node of rank 0, which is this one
    """
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": address,
        PORT_VARIABLE: str(port),
        CLUSTER_KEY_VARIABLE: secrets.token_hex(_KEY_BYTES),
        CLUSTER_KEY_FILE_VARIABLE: "",
    }


def _environment() -> dict[str, str]:
    """Return the environment of the server. It needs the keys, unlike other processes."""
    keys = {
        name: os.environ[name]
        for name in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE)
        if name in os.environ
    }
    return child_environment() | keys | {"PYTHONUNBUFFERED": "1"}


def main() -> None:
    parent, *flags = sys.argv[1:]
    if not die_with(int(parent)):
        sys.exit("the replica has ended")
    tritonserver.name_process()
    sys.exit(tritonserver.run(flags))


if __name__ == "__main__":
    main()
