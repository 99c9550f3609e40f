"""The cluster key, the leader's address, and the division of ranks among processes and GPUs."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.engine.memory.placement import place_rank
from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import ModelSpec
from slipstream.server.engine_link.cluster.address import (
    AddressError,
    first_host,
    leader_address,
    resolve,
    route_interface,
)
from slipstream.server.engine_link.cluster.division import find_local_place, ranks_per_process
from slipstream.server.engine_link.cluster.key import (
    ClusterKeyError,
    derive_keys,
    mode_problem,
    read_cluster_key,
)
from slipstream.server.engine_link.launched import Launched, find_launch
from slipstream.server.engine_link.link import LocalPlace
from slipstream.server.engine_link.rank_choice import (
    choose_ranks,
    explain_sites,
    find_sites,
    spans_machines,
)
from slipstream.weights.parameters import Quantisation

TEXT = "0123456789abcdef"
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_JOB_ID": "30017",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "3412590592.0;tcp://10.0.0.5,172.17.0.1:43417",
    "OMPI_MCA_ess_base_jobid": "3412590593",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "29500",
}
LWS = {
    "LWS_WORKER_INDEX": "1",
    "LWS_GROUP_SIZE": "2",
    "LWS_LEADER_ADDRESS": "llm-0.llm.default",
}


# the cluster key


def test_both_ends_derive_the_same_keys_and_other_keys_from_other_texts():
    assert derive_keys(TEXT) == derive_keys(TEXT)
    assert derive_keys(TEXT).listening != derive_keys(TEXT).connecting
    assert derive_keys(TEXT).listening != derive_keys(TEXT + "0").listening
    assert TEXT not in repr(derive_keys(TEXT))


def test_the_key_comes_from_the_flag_then_the_file_of_the_variable_then_the_variable(tmp_path):
    files = {}
    for name in ("flag", "variable"):
        files[name] = tmp_path / name
        files[name].write_text(f"the key of the {name}\n")
        files[name].chmod(0o600)
    environment = {"SLIPSTREAM_CLUSTER_KEY": TEXT}
    assert read_cluster_key("", environment).text == TEXT
    environment["SLIPSTREAM_CLUSTER_KEY_FILE"] = str(files["variable"])
    assert read_cluster_key("", environment).text == "the key of the variable"
    key = read_cluster_key(str(files["flag"]), environment)
    assert key.text == "the key of the flag"
    # processes that get it as variables do not read the file of another one
    assert read_cluster_key("", environment | key.variables) == key


def test_a_key_that_is_missing_short_or_readable_by_others_is_refused(tmp_path):
    with pytest.raises(ClusterKeyError, match="several machines need a cluster key: give all of"):
        read_cluster_key("", {})
    with pytest.raises(ClusterKeyError, match="has 5 characters, it must have at least 16, such"):
        read_cluster_key("", {"SLIPSTREAM_CLUSTER_KEY": "short"})
    with pytest.raises(ClusterKeyError, match=r"--cluster-key: .* cannot be read: No such file"):
        read_cluster_key(str(tmp_path / "none"), {})
    file = tmp_path / "key"
    file.write_text(TEXT)
    file.chmod(0o644)
    problem = r"SLIPSTREAM_CLUSTER_KEY_FILE: .* has the mode 0644, so that others can read it: chmo"
    with pytest.raises(ClusterKeyError, match=problem):
        read_cluster_key("", {"SLIPSTREAM_CLUSTER_KEY_FILE": str(file)})


@pytest.mark.parametrize(
    ("mode", "owner", "user", "private"),
    [
        (0o600, 1000, 1000, True),
        (0o400, 1000, 1000, True),
        (0o640, 1000, 1000, False),
        (0o440, 0, 1000, True),  # a secret that Kubernetes mounts for a group
        (0o440, 0, 0, False),
        (0o444, 0, 1000, False),
    ],
)
def test_a_group_may_read_a_key_file_of_root_only(monkeypatch, mode, owner, user, private):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    status = SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=owner)
    assert (mode_problem(status) == "") == private


# the leader's address


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, "10.0.0.7:30017"),  # the node's name does not resolve
        ({**SLURM, "SLURM_STEP_NODELIST": "localhost,n2"}, "localhost:30017"),
        ({**SLURM, "SLURM_JOB_ID": "123456"}, "10.0.0.7:23456"),
        ({**SLURM, "MASTER_ADDR": "node002", "MASTER_PORT": "5555"}, "node002:5555"),
        (MPI, "10.0.0.5:30593"),
        ({**SLURM, **MPI}, "10.0.0.5:30017"),
        (TORCHRUN, "10.0.0.9:29501"),  # torchrun listens at its port itself
        (LWS, "llm-0.llm.default:20000"),
        ({**LWS, "SLIPSTREAM_CLUSTER_PORT": "4000"}, "llm-0.llm.default:4000"),
    ],
)
def test_the_address_of_rank_0_is_read_from_the_variables_of_the_launcher(environment, expected):
    launched = find_launch(environment)
    assert launched.elsewhere == 1
    assert str(leader_address(launched, environment)) == expected


def test_an_address_that_is_not_known_or_wrong_is_an_error():
    mpi = {name: value for name, value in MPI.items() if "uri" not in name}
    with pytest.raises(AddressError, match="mpirun does not say where rank 0 runs: set MASTER_ADD"):
        leader_address(find_launch(mpi), mpi)
    wrong = {**MPI, "MASTER_PORT": "70000"}
    with pytest.raises(AddressError, match="MASTER_PORT must be a port from 1 to 65534, not '7000"):
        leader_address(find_launch(wrong), wrong)
    with pytest.raises(AddressError, match=r"address of rank 0, no\.such\.host\.invalid, does not"):
        resolve("no.such.host.invalid")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[001-004,7],m1", "node001"),
        ("r[3,5]-gpu", "r3-gpu"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first


def test_the_interface_to_a_loopback_address_is_loopback():
    assert route_interface("127.0.0.2") == "lo"


# the division


def test_ranks_are_divided_equally_or_one_for_each_of_the_first_processes():
    assert ranks_per_process(16, 2) == 8
    assert ranks_per_process(16, 16) == 1
    assert ranks_per_process(4, 16) == 1
    with pytest.raises(ValueError, match="16 ranks cannot be divided equally among 3 processes"):
        ranks_per_process(16, 3)


@pytest.mark.parametrize(
    ("launched", "gpus", "index", "each", "place"),
    [
        (Launched("srun", 9, 16, 8, 1), 8, 0, 1, LocalPlace(1, 8)),  # all see all GPUs
        (Launched("srun", 9, 16, 8, 1), 1, 0, 1, LocalPlace(0, 1)),  # --gpus-per-task=1
        (Launched("srun", 9, 16, 8, 1), 0, 0, 1, LocalPlace(1, 8)),  # a CPU
        (Launched("LeaderWorkerSet", 1, 2, 1), 8, 3, 8, LocalPlace(3, 8)),
        (Launched("srun", 3, 4, 2, 1), 8, 1, 4, LocalPlace(5, 8)),
    ],
)
def test_the_place_of_a_rank_on_its_machine(launched, gpus, index, each, place):
    assert find_local_place(launched, gpus, index, each) == place


def test_too_few_gpus_for_the_ranks_of_a_process_are_an_error():
    with pytest.raises(ValueError, match="8 ranks need 8 GPUs, and this process sees 4"):
        find_local_place(Launched("LeaderWorkerSet", 1, 2, 1), 4, 0, 8)


CONFIG = SimpleNamespace(
    spec=ModelSpec("LlamaForCausalLM", 515, 64, 2, 8, 4, 16, 96, 256),
    quantisation=Quantisation(),
    wanted_ranks=1,
)


@pytest.mark.parametrize(
    ("settings", "gpus", "launched", "ranks"),
    [
        ({}, 0, Launched("srun", 0, 2, 1), 2),  # a CPU: one for each process
        ({}, 4, Launched("LeaderWorkerSet", 0, 2, 1), 8),  # all GPUs
        ({}, 4, Launched("srun", 0, 8, 4), 8),
        ({}, 1, Launched("srun", 0, 8, 4), 8),  # each sees its own
        ({}, 0, Launched("srun", 0, 3, 1), 2),  # 3 do not divide the model
        ({}, 4, Launched("LeaderWorkerSet", 0, 3, 1), 2),  # 8 do not divide among 3 machines
        ({"replicas": 2}, 4, Launched("LeaderWorkerSet", 0, 2, 1), 4),  # a machine each
        ({"replicas": 4}, 4, Launched("LeaderWorkerSet", 0, 2, 1), 2),  # half of one
        ({"replicas": 3}, 4, Launched("LeaderWorkerSet", 0, 2, 1), 2),  # two on one of them
        ({"replicas": 2}, 4, Launched("LeaderWorkerSet", 0, 4, 1), 4),  # never on two
        ({"replicas": 2}, 8, Launched("srun", 0, 16, 8), 8),
        ({"replicas": 16}, 8, Launched("srun", 0, 16, 8), 1),
        ({"replicas": 16}, 1, Launched("srun", 0, 16, 8), 1),  # --gpus-per-task=1
        ({"replicas": 2}, 1, Launched("srun", 0, 16, 8), 1),
        ({"replicas": 2}, 0, Launched("srun", 0, 2, 1), 1),
        ({"replicas": 2}, 0, Launched("srun", 0, 8, 4), 4),
        ({"ranks": 4}, 0, Launched("srun", 0, 2, 1), 4),
    ],
)
def test_a_launcher_on_several_machines_asks_for_all_it_started(settings, gpus, launched, ranks):
    assert choose_ranks(EngineSettings(**settings), CONFIG, gpus, launched).ranks == ranks


@pytest.mark.parametrize(
    ("replicas", "ranks", "gpus", "launched", "sites"),
    [
        # a machine each; one process sees all GPUs and starts all ranks
        (2, 8, 8, Launched("srun", 0, 16, 8), [(0, 1, 0), (8, 1, 0)]),
        (2, 1, 0, Launched("mpirun", 0, 2, 1), [(0, 1, 0), (1, 1, 0)]),
        # two machines in turn: those of one machine divide it
        (
            4,
            2,
            4,
            Launched("LeaderWorkerSet", 0, 2, 1),
            [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)],
        ),
        (3, 2, 4, Launched("LeaderWorkerSet", 0, 2, 1), [(0, 2, 0), (1, 1, 0), (0, 2, 1)]),
        # each process sees a GPU of its own
        (4, 1, 1, Launched("srun", 0, 4, 2), [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0)]),
        # one machine
        (2, 1, 8, Launched("srun", 0, 8, 8), [(0, 2, 0), (0, 2, 1)]),
        (1, 16, 8, Launched("srun", 0, 16, 8), [(0, 1, 0)]),
    ],
)
def test_replicas_take_the_machines_in_turn(replicas, ranks, gpus, launched, sites):
    settings = EngineSettings(replicas=replicas, ranks=ranks)
    assert find_sites(settings, launched, gpus) == sites


def test_eight_ranks_of_two_replicas_have_sixteen_gpus_on_two_machines():
    launched = Launched("srun", 0, 16, 8)
    settings = choose_ranks(EngineSettings(replicas=2), CONFIG, 8, launched)
    places = set()
    for site in find_sites(settings, launched, 8):
        own = replace(settings, replicas=site.replicas, replica=site.replica)
        for rank in range(8):
            placement = place_rank(own, rank, 8, 8)
            assert placement.sharing == 1
            places.add((site.process // launched.local_size, placement.device))
    assert places == {(machine, gpu) for machine in range(2) for gpu in range(8)}


def test_replicas_that_do_not_fit_on_machines_are_refused():
    launched = Launched("srun", 0, 16, 8)
    with pytest.raises(
        ValueError, match="16 ranks of a replica do not fit on one machine, where 8 "
    ):
        find_sites(EngineSettings(replicas=2, ranks=16), launched, 8)
    with pytest.raises(
        ValueError, match="where 1 processes from mpirun can be used: use at most 1"
    ):
        find_sites(EngineSettings(replicas=2, ranks=2), Launched("mpirun", 0, 2, 1), 0)
    with pytest.raises(
        ValueError, match="names GPUs of one machine, and the 2 replicas are on sev"
    ):
        find_sites(EngineSettings(replicas=2, devices=(0, 1)), launched, 8)
    with pytest.raises(
        ValueError, match="of 12 processes from srun: this one has 8 of them; start"
    ):
        find_sites(EngineSettings(replicas=2), Launched("srun", 0, 12, 8), 8)


def test_the_places_of_replicas_are_said_and_those_that_stay_empty(caplog):
    caplog.set_level(logging.INFO)
    launched = Launched("srun", 0, 4, 1)
    settings = EngineSettings(replicas=2, ranks=8)
    explain_sites("tiny", find_sites(settings, launched, 8), launched, 8)
    explain_sites("tiny", find_sites(EngineSettings(), launched, 8), launched, 8)
    assert caplog.messages == [
        "the replicas of tiny are started by the processes 0, 1 of 4 from srun",
        "tiny has 2 replicas for 4 machines: 2 of these are not used; --replicas=4 uses all",
    ]


def test_ranks_that_fit_on_the_machine_of_rank_0_stay_there():
    launched = Launched("srun", 0, 16, 8)
    assert not spans_machines(EngineSettings(ranks=8), launched)
    assert spans_machines(EngineSettings(ranks=16), launched)
    assert not spans_machines(EngineSettings(ranks=16), Launched("srun", 0, 16, 16))
    with pytest.raises(ValueError, match="gpu_device_ids names GPUs of one machine, and 16 ranks"):
        spans_machines(EngineSettings(ranks=16, devices=range(16)), launched)
