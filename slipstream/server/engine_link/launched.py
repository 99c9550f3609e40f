"""The place of this process among those that a launcher started: mpirun, srun, torchrun, a
LeaderWorkerSet of Kubernetes, Ray, or `slipstream launch --world_size`. No torch here.

Rank 0 is the server. If all processes are on its machine, it starts the ranks of its engines itself
and the others wait. If some are on other machines, the others start ranks for it: see `cluster/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# set by `slipstream launch` for the server that it starts
WORLD_SIZE_VARIABLE = "SLIPSTREAM_WORLD_SIZE"


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables by which a launcher tells its processes where they are."""

    name: str
    rank: str
    size: str
    # number of processes on this machine; of Slurm, a list such as "4(x2)"
    local_size: str = ""
    local_rank: str = ""
    nodes: str = ""
    job: str = ""
    also: str = ""  # must be set, too: other programs set the first ones
    one_per_machine: bool = False
    needs_size: bool = False  # without it, each process would be a server of its own


# set by `slipstream/ray` for the processes of a replica
RAY = Launcher(
    "Ray",
    "SLIPSTREAM_RAY_RANK",
    "SLIPSTREAM_RAY_SIZE",
    job="SLIPSTREAM_RAY_JOB",
    one_per_machine=True,
)
# The first one that is set counts: mpirun inside of sbatch sets Slurm's variables, too, and Ray may
# have been started by any of the others.
LAUNCHERS = (
    RAY,
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        job="TORCHELASTIC_RUN_ID",
        also="LOCAL_RANK",
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        job="OMPI_MCA_ess_base_jobid",
    ),
    # A batch script outside of srun has SLURM_PROCID and SLURM_NTASKS, but no step.
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_LOCALID",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_ID",
    ),
    # PMIx sets no size. Slurm with PMIx sets its own variables, too, and so does Open MPI.
    Launcher("PMIx", "PMIX_RANK", "SLURM_NTASKS", needs_size=True),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    Launcher(
        "LeaderWorkerSet",
        "LWS_WORKER_INDEX",
        "LWS_GROUP_SIZE",
        job="LWS_LEADER_ADDRESS",
        one_per_machine=True,
    ),
)
RANK_VARIABLES = tuple(launcher.rank for launcher in LAUNCHERS if not launcher.also)


class LaunchError(ValueError):
    """The place of this process is not known. The text says what to set."""


@dataclass(frozen=True, slots=True)
class Launched:
    """One process of a launcher."""

    launcher: str = ""  # empty: none started this process
    rank: int = 0
    size: int = 1
    local_size: int = 1  # processes on this machine
    local_rank: int = 0  # among those
    nodes: str = ""  # the machines, if the launcher names them
    job: str = ""  # the same in all processes of the launcher, if it has such a name

    @property
    def elsewhere(self) -> int:
        """The number of processes on other machines."""
        return self.size - self.local_size


def find_launch(environment: Mapping[str, str] = os.environ) -> Launched:
    """Return where this process is. Raises LaunchError."""
    for launcher in LAUNCHERS:
        rank = _number(environment.get(launcher.rank))
        if rank is None or (launcher.also and launcher.also not in environment):
            continue
        size = _number(environment.get(launcher.size))
        if size is None and launcher.needs_size:
            raise LaunchError(
                f"{launcher.rank} is {rank}, and nothing says how many processes were started: "
                "start them with srun, torchrun or Open MPI's mpirun, or unset "
                f"{launcher.rank} to start one server"
            )
        size = max(size or 1, rank + 1)
        local = _number(environment.get(launcher.local_size, "").partition("(")[0].split(",")[0])
        local = 1 if launcher.one_per_machine else local or size
        local = min(local, size)
        local_rank = min(_number(environment.get(launcher.local_rank)) or 0, local - 1)
        nodes = environment.get(launcher.nodes, "")
        job = environment.get(launcher.job, "")
        return Launched(launcher.name, rank, size, local, local_rank, nodes, job)
    size = _number(environment.get(WORLD_SIZE_VARIABLE)) or 1
    return Launched("slipstream launch" if size > 1 else "", 0, size, size)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() else None
