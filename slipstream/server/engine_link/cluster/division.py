"""How the ranks of an engine are divided among the processes of a launcher, and how the replicas of
an engine are spread over its machines. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from slipstream.server.engine_link.launched import Launched
from slipstream.server.engine_link.link import LocalPlace


def ranks_per_process(ranks: int, processes: int) -> int:
    """Return how many ranks each process starts; without enough ranks, the last ones start none.

    Raises ValueError if they cannot have the same number.
    """
    if ranks > processes and ranks % processes:
        raise ValueError(
            f"{ranks} ranks cannot be divided equally among {processes} processes: use a multiple "
            f"of {processes}, or start as many processes as ranks"
        )
    return max(1, ranks // processes)


def can_divide(ranks: int, processes: int) -> bool:
    return ranks <= processes or ranks % processes == 0


def gpus_per_process(launched: Launched, gpus: int) -> int:
    """Return how many of the visible GPUs are for one process of the launcher; 1 on a CPU."""
    return max(1, gpus // launched.local_size)


def find_local_place(launched: Launched, gpus: int, index: int, each: int) -> LocalPlace:
    """Return the place of a rank on its machine, which chooses its GPU.

    gpus: visible to this process; 0: it runs on a CPU. index: of the rank among the `each` ranks
    that the process starts. Raises ValueError if there are too few GPUs.
    """
    if gpus and gpus < launched.local_size * each:
        # The launcher shows each process its own GPUs only.
        if gpus < each:
            raise ValueError(
                f"{each} ranks need {each} GPUs, and this process sees {gpus}: use fewer ranks, or "
                "have the launcher show it more"
            )
        return LocalPlace(index, each)
    return LocalPlace(launched.local_rank * each + index, launched.local_size * each)


class ReplicaSite(NamedTuple):
    """Where a replica runs: one process of the launcher starts all of its ranks."""

    process: int
    replicas: int  # of this engine on the same site
    replica: int  # index among those


@dataclass(frozen=True, slots=True)
class Spread:
    """The sites that replicas take in turn: the machines of a launcher, or its processes if each
    sees GPUs of its own only.
    """

    sites: int
    processes: int  # of the launcher on each site; the first one starts the replicas
    ranks: int  # that fit on a site

    def place(self, replica: int, replicas: int) -> ReplicaSite:
        site = replica % self.sites
        here = range(site, replicas, self.sites)
        return ReplicaSite(site * self.processes, len(here), replica // self.sites)

    def most_ranks(self, replicas: int) -> int:
        """Return how many ranks a replica can have without a shared GPU; at least 1."""
        return max(1, self.ranks // self.place(0, replicas).replicas)


def spread_replicas(launched: Launched, gpus: int) -> Spread:
    """Return where replicas run. Raises ValueError if the machines have unequal processes.

    gpus: visible to each process; 0: the engine runs on a CPU, with a rank for each process
    """
    masked = 0 < gpus < launched.local_size  # the launcher shows each process its own GPUs only
    processes = 1 if masked else launched.local_size
    if launched.size % processes:
        raise ValueError(
            f"replicas cannot be spread over the machines of {launched.size} processes from "
            f"{launched.launcher}: this one has {processes} of them; start as many on each machine"
        )
    return Spread(launched.size // processes, processes, gpus or processes)
