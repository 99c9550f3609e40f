"""The place of a process among those of a launcher."""

import pytest

from slipstream.ray.server_process import launch_variables
from slipstream.server.engine_link.launched import Launched, LaunchError, find_launch

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched()),
        (OPEN_MPI, Launched("mpirun", 1, 4, 2)),
        (SLURM, Launched("srun", 3, 16, 8)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,2"}, Launched("srun", 3, 16, 4)),
        (TORCHRUN, Launched("torchrun", 0, 2, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Launched()),  # not torchrun's
        ({**SLURM, **OPEN_MPI}, Launched("mpirun", 1, 4, 2)),  # mpirun inside of sbatch
        ({"PMIX_RANK": "2", "SLURM_NTASKS": "4"}, Launched("PMIx", 2, 4, 4)),
        ({**SLURM, "PMIX_RANK": "3"}, Launched("srun", 3, 16, 8)),  # srun --mpi=pmix
        ({**OPEN_MPI, "PMIX_RANK": "1"}, Launched("mpirun", 1, 4, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launched("MPI", 1, 2, 2)),
        # a batch script without srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Launched("srun", 0, 1, 1)),
        (
            {**SLURM, "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"},
            Launched("srun", 3, 16, 8, 1, "n[1-2]", "7"),
        ),
        ({"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}, Launched("LeaderWorkerSet", 1, 2, 1)),
        # Ray that was started by srun
        (
            {**SLURM, **launch_variables(1, 2, "group")},
            Launched("Ray", 1, 2, 1, job="group"),
        ),
        ({**SLURM, **launch_variables(0, 1)}, Launched("Ray", 0, 1, 1)),
        ({"SLIPSTREAM_WORLD_SIZE": "4"}, Launched("slipstream launch", 0, 4, 4)),
        ({"SLIPSTREAM_WORLD_SIZE": "many"}, Launched()),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, Launched()),
    ],
)
def test_the_place_is_read_from_the_variables_of_the_launcher(environment, expected):
    assert find_launch(environment) == expected


def test_ranks_on_other_machines_are_counted():
    assert find_launch(SLURM).elsewhere == 8
    assert find_launch(TORCHRUN).elsewhere == 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_of_pmix_without_a_number_of_processes_is_refused(rank):
    """PMIx sets no size. As a launch of one process, each would be a server of its own."""
    with pytest.raises(LaunchError, match=f"PMIX_RANK is {rank}, and nothing says how many"):
        find_launch({"PMIX_RANK": rank, "PMIX_NAMESPACE": "prterun-n1-7@1"})
