"""How the ranks of an engine are divided among the processes of a launcher. No torch here."""

from __future__ import annotations

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
