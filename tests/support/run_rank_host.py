"""A rank host as a process.

`python run_rank_host.py PORT [COMMAND ...]`. COMMAND replaces the program that runs a rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slipstream.server.engine_link.cluster.address import LeaderAddress
from slipstream.server.engine_link.cluster.host import RankHost
from slipstream.server.engine_link.cluster.key import CLUSTER_KEY_VARIABLE, read_cluster_key
from slipstream.server.engine_link.cluster.leader import ClusterOptions
from slipstream.server.engine_link.launched import Launched
from slipstream.server.log.output import configure_log

ROOT = Path(__file__).parents[2]
KEY = "the key of all ranks in a test"
ADDRESS = "127.0.0.2"  # the leader's "machine"
HEARTBEAT_SECONDS = 0.2
WAIT_SECONDS = 60.0


def options_of(process: int, port: int, size: int = 2) -> ClusterOptions:
    """Return the options of one of several processes, each on a machine of its own."""
    address = LeaderAddress(ADDRESS, port)
    key = read_cluster_key(environment={CLUSTER_KEY_VARIABLE: KEY})
    return ClusterOptions(Launched("mpirun", process, size, 1), address, key, WAIT_SECONDS)


class HostProcess:
    """A rank host in a process of its own, with the first rank after the leader's."""

    def __init__(self, port: int, log: Path, *command: str, key: str = KEY) -> None:
        self._log = log
        environment = os.environ | {
            CLUSTER_KEY_VARIABLE: key,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(port), *command],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main() -> int:
    configure_log()
    port = int(sys.argv[1])
    options = options_of(1, port)
    key = read_cluster_key()
    own = ClusterOptions(options.launched, options.address, key, options.wait_seconds)
    return RankHost(own, HEARTBEAT_SECONDS, sys.argv[2:] or None).run()


if __name__ == "__main__":
    sys.exit(main())
