"""What a command does that a launcher has started as one of several processes: rank 0 serves, the
others start ranks for it on other machines, or wait.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.server.engine_link.launched import Launched, find_launch

if TYPE_CHECKING:
    from slipstream.server.engine_link.cluster.leader import ClusterOptions

logger = logging.getLogger(__name__)

_NOT_LAUNCHED = Launched()


class Started(NamedTuple):
    """The place of this process, and how it reaches those on other machines."""

    launched: Launched = _NOT_LAUNCHED
    cluster: ClusterOptions | None = None  # None: processes on other machines are not needed

    @property
    def serves(self) -> bool:
        return self.launched.rank == 0

    def run_without_server(self, address: str, port: int | None) -> int:
        """Do what a process other than rank 0 does, until it ends. Return the exit code.

        address, port: where to answer liveness probes; None: nowhere. Raises OSError if the port is
        in use
        """
        if self.cluster is None:
            return _wait_for_signal(self.launched)
        from slipstream.server.engine_link.cluster.host import RankHost
        from slipstream.server.engine_link.cluster.live_probe import answer_live_probe

        if self.launched.launcher == "LeaderWorkerSet" and port is not None:
            answer_live_probe(address, port)
        return RankHost(self.cluster).run()

    def wanted_ranks(self, ranks: int | None) -> dict[str, Any]:
        """Return the engine setting for the processes on this machine, if no ranks are given."""
        if ranks is None and self.launched.local_size > 1:
            return {"wanted_ranks": self.launched.local_size}
        return {}

    def warn_of_unused(self, ranks: int | None) -> None:
        """Say that processes on other machines are not used."""
        if self.launched.elsewhere > 0 and self.cluster is None:
            logger.warning(
                "%s started %d of %d processes on other machines, which are not used: --ranks=%d "
                "fits on this one; --replicas=N puts replicas on all",
                self.launched.launcher,
                self.launched.elsewhere,
                self.launched.size,
                ranks,
            )


def find_start(
    ranks: int | None, replicas: int | None, key_file: str, wait_seconds: float
) -> Started:
    """Return the place of this process. Raises ValueError if it is not known, or the cluster key.

    ranks, replicas: as given on the command line. wait_seconds: longest wait for other machines
    """
    launched: Launched = find_launch()
    fits = ranks is not None and ranks <= launched.local_size
    if not launched.elsewhere or (fits and (replicas or 1) == 1):
        return Started(launched)
    from slipstream.server.engine_link.cluster.address import leader_address
    from slipstream.server.engine_link.cluster.key import read_cluster_key
    from slipstream.server.engine_link.cluster.leader import ClusterOptions

    key = read_cluster_key(key_file)
    options = ClusterOptions(launched, leader_address(launched), key, wait_seconds)
    return Started(launched, options)


def _wait_for_signal(launched: Launched) -> int:
    """Wait for a signal, as a rank other than 0. Rank 0 serves and starts its engines itself."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    logger.info(
        "rank %d of %d from %s serves nothing and waits for a signal to end: rank 0 is the server, "
        "and it starts the ranks of its engines itself",
        launched.rank,
        launched.size,
        launched.launcher,
    )
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0
