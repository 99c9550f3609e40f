"""The leader and a rank host: what they accept, what they refuse, and how they notice each other's end.

The leader is in the test's process, at the address of another machine; the host is a process.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from run_rank_host import ADDRESS, HEARTBEAT_SECONDS, KEY, ROOT, HostProcess, options_of
from tiny_server import children_of, is_running, wait_for

from slipstream.server.engine_link.cluster import host as host_module
from slipstream.server.engine_link.cluster import leader as leader_module
from slipstream.server.engine_link.cluster.address import AddressError
from slipstream.server.engine_link.cluster.host import RankHost
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.cluster.messages import (
    EndRank,
    Machine,
    RankEnded,
    StartRank,
    decode_from_host,
    decode_to_host,
    encode,
)
from slipstream.server.engine_link.link import EXIT_WITH_REASON, LinkError, RankPlace
from slipstream.weights.integrity import identify_folder

NAME = socket.gethostname()
# as an engine process, it ends with the process that started it
SLEEPER = (
    sys.executable,
    "-c",
    "import json, sys, time; from slipstream.server.log.parent_death import die_with; "
    "time.sleep(600) if die_with(json.loads(sys.argv[1])['parent_process']) else None",
)
FAILING = (sys.executable, "-c", "import sys; sys.exit(9)")


@pytest.fixture
def hosts() -> Iterator[RankHosts]:
    opened = RankHosts(options_of(0, 0), HEARTBEAT_SECONDS)
    yield opened
    opened.close()


@pytest.fixture
def start_host(hosts, tmp_path) -> Iterator:
    started: list[HostProcess] = []

    def start(*command: str, **fields: str) -> HostProcess:
        started.append(HostProcess(hosts.port, tmp_path / f"log{len(started)}", *command, **fields))
        return started[-1]

    yield start
    for host in started:
        host.close()


@pytest.fixture
def start(hosts, tmp_path) -> StartRank:
    """Return an order to start rank 1 of an engine that this machine has."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text(json.dumps({"engine": 1}))
    folder = str(tmp_path / "engine")
    settings = {"device": "cpu", "ranks": 2}
    place = RankPlace(1, 2, f"{ADDRESS}:1", [])
    return StartRank(
        hosts.next_engine(), folder, identify_folder(folder), settings, place, 0, 1, gpus=0
    )


def test_a_rank_is_started_and_ended_by_the_leader(hosts, start_host, start):
    host = start_host(*SLEEPER)
    rank = hosts.start(1, start)
    wait_for(lambda: not rank.awaited and children_of(host.process.pid))
    (process,) = children_of(host.process.pid)
    assert rank.label == f"rank 1 on {NAME}: "
    rank.kill()
    assert rank.describe_exit(rank.wait()) == f"rank 1 on {NAME}: killed by SIGKILL"
    assert not is_running(process)
    hosts.close()
    assert host.wait() == 0


def test_the_exit_code_of_a_rank_is_passed_on(hosts, start_host, start):
    start_host(*FAILING)
    assert hosts.start(1, start).wait() == 9


def test_a_missing_engine_folder_is_named_with_its_host(hosts, start_host, start):
    start_host(*SLEEPER)
    rank = hosts.start(1, replace(start, engine_folder="/nowhere/engine"))
    assert rank.wait() == EXIT_WITH_REASON
    assert f"{rank.label}{rank.reason}" == (
        f"rank 1 on {NAME}: the engine folder /nowhere/engine cannot be read: No such file or "
        "directory; every machine needs it under the same path"
    )


def test_another_engine_folder_is_refused_with_both_digests(hosts, start_host, start):
    start_host(*SLEEPER)
    rank = hosts.start(1, replace(start, identity="0123456789abcdef" * 4))
    assert rank.wait() == EXIT_WITH_REASON
    assert f"is {start.identity[:16]}…, there 0123456789abcdef…; copy the folder" in rank.reason


def test_another_kind_of_device_is_refused_with_both(hosts, start_host, start):
    start_host(*SLEEPER)
    rank = hosts.start(1, replace(start, gpus=1))
    assert rank.wait() == EXIT_WITH_REASON
    assert "this machine runs the engine on a CPU, and rank 0 on a GPU" in rank.reason


def test_other_software_is_refused_on_both_sides(monkeypatch, hosts, start_host, start, caplog):
    monkeypatch.setattr(leader_module, "describe_software", lambda: "slipstream 99 with torch 1")
    host = start_host(*SLEEPER)
    rank = hosts.start(1, start)
    assert rank.wait() == EXIT_WITH_REASON
    assert ", rank 0 runs slipstream 99 with torch 1: install the same" in rank.reason
    assert host.wait() == 1
    assert rank.reason in host.log()
    assert f"process 1 on {NAME} is refused: {rank.reason}" in caplog.text
    assert hosts.start(1, start).wait() == EXIT_WITH_REASON  # at once, without a wait


def test_another_cluster_key_is_refused_and_said_on_both_sides(hosts, start_host, start, caplog):
    host = start_host(*SLEEPER, key="the key of another cluster")
    assert host.wait() == 1
    assert "refuses this process: its cluster key is another one" in host.log()
    wait_for(lambda: "its cluster key is not the one of rank 0" in caplog.text)
    assert "a process at 127.0.0.1 is refused" in caplog.text
    rank = hosts.start(1, start)
    assert rank.awaited
    start_host(*SLEEPER)
    wait_for(lambda: not rank.awaited)


def test_a_connection_that_sends_nothing_is_not_reported_as_another_key(hosts, caplog):
    socket.create_connection((ADDRESS, hosts.port)).close()
    host = hosts.start(1, StartRank(1, "", "", {}, RankPlace(1, 2, "", []), 0, 1, gpus=0))
    host.kill()
    assert host.wait() == -signal.SIGKILL
    assert "cluster key" not in caplog.text


def test_the_leader_says_what_it_waits_for_and_gives_up(monkeypatch, start, caplog):
    monkeypatch.setattr(leader_module, "REPORT_SECONDS", 0.1)
    caplog.set_level(logging.INFO)
    hosts = RankHosts(replace(options_of(0, 0, size=3), wait_seconds=1.5))
    ranks = [hosts.start(process, start) for process in (1, 2)]
    assert [rank.wait() for rank in ranks] == [EXIT_WITH_REASON] * 2
    assert ranks[1].reason == (
        f"process 2 from mpirun did not report to {ADDRESS}:{hosts.port} within 1.5 s "
        "(--rank-wait-secs): check that it runs, that it reaches this address, and its log"
    )
    assert (
        "waiting for ranks 1, 1: of the processes from mpirun, these have not reported: 1, 2; "
        "these have: none"
    ) in caplog.messages
    assert hosts.start(1, start).wait() == EXIT_WITH_REASON  # its time is over
    hosts.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_host_ends_its_ranks(hosts, start_host, start, number):
    """A stopped host misses its heartbeats."""
    host = start_host(*SLEEPER)
    rank = hosts.start(1, start)
    wait_for(lambda: children_of(host.process.pid))
    (process,) = children_of(host.process.pid)
    host.process.send_signal(number)
    assert rank.wait() == EXIT_WITH_REASON
    assert rank.reason == "its rank host has ended, or cannot be reached"
    if number == signal.SIGSTOP:  # it connects again, and has ended what the leader gave up
        again = hosts.start(1, start)
        host.process.send_signal(signal.SIGCONT)
        wait_for(lambda: not again.awaited)
        assert "the connection to rank 0 was lost, and is made again" in host.log()
    else:
        start_host(*SLEEPER)
        again = hosts.start(1, start)
        wait_for(lambda: not again.awaited)
    wait_for(lambda: not is_running(process))


def test_all_ranks_of_a_replica_are_started_and_ended_on_a_host(hosts, start_host, start):
    host = start_host(*SLEEPER)
    whole = replace(start, whole=True, each=2)
    follower = hosts.start(1, replace(whole, place=RankPlace(1, 2, "", [])))
    links = ["tcp://127.0.0.2:1"]
    leader = hosts.start(1, replace(whole, place=RankPlace(0, 2, "", []), links=links))
    wait_for(lambda: len(children_of(host.process.pid)) == 2)
    orders = [order_of(process) for process in children_of(host.process.pid)]
    assert sorted(order["place"]["rank"] for order in orders) == [0, 1]
    (folder,) = {Path(order["place"]["store"]).parent for order in orders}
    assert links in [order["sockets"] for order in orders]
    assert folder.is_dir()
    hosts.note_met(1, start.engine)
    wait_for(lambda: not folder.exists())
    for rank in (leader, follower):
        rank.kill()
        assert rank.wait() == -signal.SIGKILL
    wait_for(lambda: not children_of(host.process.pid))


def order_of(process: int) -> dict:
    """Return the argument of the process of a rank, once it runs that program."""

    def last_word() -> bytes:
        return Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2]

    wait_for(lambda: last_word().startswith(b"{"))
    found: dict = json.loads(last_word())
    return found


def test_the_files_of_a_replica_are_removed_with_its_last_rank(hosts, start_host, start):
    host = start_host(*SLEEPER)
    whole = replace(start, whole=True, each=2)
    rank = hosts.start(1, whole)
    wait_for(lambda: children_of(host.process.pid))
    (process,) = children_of(host.process.pid)
    folder = Path(order_of(process)["place"]["store"]).parent
    assert folder.is_dir()
    rank.kill()
    rank.wait()
    wait_for(lambda: not folder.exists())


def test_replicas_need_as_many_gpus_on_each_machine(monkeypatch, start):
    host = RankHost(options_of(1, 1))
    monkeypatch.setattr(host_module, "visible_gpus", lambda device: 4)
    whole = replace(start, whole=True, gpus=8)
    with pytest.raises(host_module.RankProblem, match="sees 4 GPUs, and rank 0 of mpirun 8: repl"):
        host._spawn(whole)


def test_replicas_need_processes_in_the_order_of_the_machines(start):
    options = options_of(1, 1)
    launched = replace(options.launched, rank=8, size=16, local_size=8, local_rank=4)
    host = RankHost(replace(options, launched=launched))
    with pytest.raises(host_module.RankProblem, match="process 8 is not the first one on its mach"):
        host._spawn(replace(start, whole=True))


def test_a_process_that_sees_one_gpu_of_several_says_so(monkeypatch, start, caplog):
    """As with --gpus-per-task=1."""
    caplog.set_level(logging.INFO)
    options = options_of(1, 1)
    monkeypatch.setattr(host_module, "visible_gpus", lambda device: 1)
    for local_size in (8, 1):
        launched = replace(options.launched, size=16, local_size=local_size)
        host = RankHost(replace(options, launched=launched), command=SLEEPER)
        rank = host._spawn(replace(start, gpus=1))
        rank.process.kill()
        rank.process.reap()
        rank.link.close()
        lines = [line for line in caplog.messages if "shows each process one GPU only" in line]
        assert len(lines) == 1  # not on a machine of one GPU
        assert "(as --gpus-per-task does): ranks cannot read each other's memory" in lines[0]


def test_a_host_that_is_started_twice_takes_the_place_of_the_first(hosts, start_host, start):
    first = start_host(*SLEEPER)
    rank = hosts.start(1, start)
    wait_for(lambda: not rank.awaited)
    start_host(*SLEEPER)
    assert rank.wait() == EXIT_WITH_REASON
    assert rank.reason == "its rank host was started again"
    assert first.wait() == 1
    assert "rank 0 refuses this process: process 1 was started again" in first.log()
    assert not hosts.start(1, start).ended


LEADER = """
import sys
sys.path.insert(0, sys.argv[1])
from run_rank_host import options_of
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.cluster.messages import StartRank
from slipstream.server.engine_link.link import RankPlace
hosts = RankHosts(options_of(0, 0))
place = RankPlace(1, 2, "", [])
rank = hosts.start(1, StartRank(1, sys.argv[2], sys.argv[3], {"device": "cpu"}, place, 0, 1, 0))
print(hosts.port, flush=True)
rank.wait()
"""


def test_a_host_and_its_ranks_end_with_the_leader(start, tmp_path):
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", LEADER, support, start.engine_folder, start.identity]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        host = HostProcess(int(leader.stdout.readline()), tmp_path / "log", *SLEEPER)
        wait_for(lambda: children_of(host.process.pid))
        (process,) = children_of(host.process.pid)
        leader.kill()
        assert host.wait() == 1
    assert not is_running(process)
    assert "has ended, and this process with it" in host.log()


def test_a_signal_ends_a_host_only_without_ranks(hosts, start_host, start):
    busy = start_host(*SLEEPER)
    rank = hosts.start(1, start)
    wait_for(lambda: children_of(busy.process.pid))
    busy.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: this process ends with rank 0" in busy.log())
    rank.kill()
    rank.wait()
    busy.process.send_signal(signal.SIGTERM)
    assert busy.wait() == 0


def test_the_leader_cannot_listen_at_the_address_of_another_machine(hosts):
    options = options_of(0, hosts.port)
    with pytest.raises(AddressError, match=r"rank 0 cannot listen at .*: Address already in use"):
        RankHosts(options)
    elsewhere = replace(options, address=options.address._replace(host="192.0.2.1"))
    with pytest.raises(AddressError, match=r"set MASTER_ADDR to an address of this machine"):
        RankHosts(elsewhere)


def test_messages_are_decoded_into_their_own_types_only(start):
    from_host = [Machine(1, "7", "n1", "slipstream"), RankEnded(1, 1, -9)]
    assert [decode_from_host(encode(message)) for message in from_host] == from_host
    assert [decode_to_host(encode(message)) for message in (start, EndRank(1, 2))] == [
        start,
        EndRank(1, 2),
    ]
    with pytest.raises(LinkError, match="unexpected kind of message between machines: b'S'"):
        decode_from_host(encode(start))
    with pytest.raises(LinkError, match="damaged StartRank between machines"):
        decode_to_host(b"S\x93")
    with pytest.raises(LinkError, match="damaged Machine between machines"):
        decode_from_host(encode(from_host[0]).replace(b"n1", b"n\xff"))


def test_a_host_of_another_job_is_refused(monkeypatch, hosts, start_host, start):
    monkeypatch.setattr(hosts, "launched", replace(hosts.launched, job="77"))
    start_host(*SLEEPER)
    rank = hosts.start(1, start)
    assert rank.wait() == EXIT_WITH_REASON
    assert "belongs to the job without a name of its launcher, rank 0 to 77: set an" in rank.reason


LAUNCHERS = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    },
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    },
    "LeaderWorkerSet": {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tritonserver_is_a_host_as_a_further_rank_of_any_launcher(hosts, start, tmp_path, launcher):
    port = free_port()
    variables = {
        **LAUNCHERS[launcher],
        "MASTER_ADDR": ADDRESS,
        "SLIPSTREAM_CLUSTER_PORT": str(hosts.port),
        "SLIPSTREAM_CLUSTER_KEY": KEY,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "slipstream.cli.compat.tritonserver", "--ranks=2"]
    command += [f"--model-repository={tmp_path}", f"--http-port={port}"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        host = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        rank = hosts.start(1, replace(start, engine_folder="/nowhere"))
        assert rank.wait() == EXIT_WITH_REASON
        assert "the engine folder /nowhere cannot be read" in rank.reason
        if launcher == "LeaderWorkerSet":
            assert ask(port, "/v2/health/live") == 200
            assert ask(port, "/v2/health/ready") == 400
        else:
            with pytest.raises(ConnectionRefusedError):
                ask(port, "/v2/health/live")
        hosts.close()
        assert host.wait(60) == 0
    finally:
        host.kill()
        host.wait()
    first, *others = log.read_text().splitlines()
    assert f"process 1 of 2 from {launcher} runs ranks for rank 0" in first
    assert ["rank 1 cannot start" in line for line in others] == [True]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def ask(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().status
