"""The scripts of the tutorial for Slurm, as pasted, on a Slurm on this machine.

Only its placeholders, container, clock setting and program path are replaced.

apt-get install slurm-wlm munge libpmix-dev
pytest -m cluster tests/deploy/test_slurm_tutorial.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import limit_cache
from test_launchers import CLUSTER_KEY, CPU, SmallSlurm, ask, own_processes
from tiny_engine import build_tiny_engine
from tiny_server import is_running, wait_for

from slipstream.llm import LLM
from slipstream.repository.templates import write_repository

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("slurmd") is None, reason="Slurm is not installed"),
]

SCRIPTS = Path(__file__).parent / "tutorial"
TASKS = 8
STARTED = (
    r"Started GRPCInferenceService at \S+:\d+",
    r"Started HTTPService at \S+:(\d+)",
    r"Started Metrics Service at \S+:\d+",
)


class TutorialSlurm(SmallSlurm):
    """A Slurm whose nodes have a core for each of the tutorial's tasks."""

    def _configuration(self) -> str:
        return super()._configuration().replace("CPUs=4", f"CPUs={2 * TASKS}")


@pytest.fixture(scope="module")
def small_slurm() -> Iterator[SmallSlurm]:
    cluster = TutorialSlurm(Path("/tmp") / f"slurm-tutorial-{os.getpid()}")
    try:
        cluster.start()
        if "pmix" not in cluster.ask("srun", "--mpi=list"):
            pytest.skip("Slurm has no PMIx: libpmix-dev is not installed")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("tutorial"))


@pytest.fixture(scope="module")
def expected(engine: Path) -> str:
    with LLM(engine, device="cpu", cache_tokens=1024, threads=1) as llm:
        return llm.generate("5 6 7", max_tokens=8, ignore_end=True)[0].text


class TutorialJob:
    """The tutorial's job in a folder of its own."""

    def __init__(self, folder: Path, engine: Path, slurm: SmallSlurm, nodes: int = 1) -> None:
        """nodes: with several, a task on each, which PMIx does not start on one machine"""
        self._folder = folder
        self._environment = CPU | slurm.environment | CLUSTER_KEY
        self._nodes = nodes
        self.tasks = TASKS if nodes == 1 else nodes
        write_repository(folder / "triton_backend", "tiny", engine, engine, 64)
        limit_cache(folder / "triton_backend", 4096)
        program = folder / "tritonserver"
        command = shlex.join([sys.executable, "-m", "slipstream.cli.compat.tritonserver"])
        ports = "--http-port=0 --grpc-port=0 --metrics-port=0"  # the default ones may be taken
        program.write_text(f'#!/bin/sh\nexec {command} "$@" {ports}\n')
        program.chmod(0o755)
        self._write_scripts(program)
        (folder / "logs").mkdir()
        submitted = self._run("sbatch", "tensorrt_llm_triton.sub")
        self.number = submitted.split()[-1]

    def _write_scripts(self, program: Path) -> None:
        for path in SCRIPTS.iterdir():
            text = path.read_text().replace("<workdir>", str(self._folder))
            text = text.replace("/opt/tritonserver/bin/tritonserver", str(program))
            text = text.replace("sudo nvidia-smi -lgc 1410,1410\n", "")
            text = re.sub(r"--container-\w+ \S+", "", text)
            if self._nodes > 1:
                text = text.replace("--nodes=1", f"--nodes={self._nodes}")
                text = text.replace(f"--ntasks-per-node={TASKS}", "--ntasks-per-node=1")
                text = text.replace("--mpi=pmix", "--mpi=none")
            (self._folder / path.name).write_text(text)

    def _run(self, *command: str) -> str:
        return subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def log(self, task: int) -> str:
        path = self._folder / "logs" / f"tensorrt_llm_{task}.out"
        return path.read_text() if path.exists() else ""

    def wait_started(self) -> str:
        """Return the HTTP port once the server has started and the other tasks wait."""

        def started() -> bool:
            assert self.queued(), (self._folder / "logs" / "tensorrt_llm.error").read_text()
            others = all(self.log(task) for task in range(1, self.tasks))
            return others and all(re.search(line, self.log(0)) for line in STARTED)

        wait_for(started, 120)
        (port,) = re.findall(STARTED[1], self.log(0))
        return str(port)

    def queued(self) -> bool:
        return bool(self._run("squeue", "-h", "-j", self.number).strip())

    def cancel(self) -> None:
        self._run("scancel", self.number)

    def processes(self) -> list[int]:
        """Return the processes whose command names the job's folder."""
        own = own_processes()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if int(path.name) not in own and str(self._folder).encode() in command:
                found.append(int(path.name))
        return found


@pytest.fixture
def job(tmp_path: Path, engine: Path, small_slurm: SmallSlurm) -> Iterator[TutorialJob]:
    yield TutorialJob(tmp_path, engine, small_slurm)
    small_slurm.cancel_jobs()


def test_the_job_starts_one_server_and_is_cancelled(job, expected):
    port = job.wait_started()
    for line in STARTED:
        assert len(re.findall(line, job.log(0))) == 1
    for task in range(1, TASKS):
        (only,) = job.log(task).splitlines()
        assert f"rank {task} of {TASKS} from srun serves nothing and waits" in only
    assert ask(port) == expected
    job.cancel()
    wait_for(lambda: not job.queued(), 60)
    wait_for(lambda: not job.processes())


def test_the_job_on_two_nodes_serves_over_both(tmp_path, engine, small_slurm):
    with LLM(engine, device="cpu", cache_tokens=1024, threads=1, ranks=2) as llm:
        expected = llm.generate("5 6 7", max_tokens=8, ignore_end=True)[0].text
    job = TutorialJob(tmp_path, engine, small_slurm, nodes=2)
    try:
        port = job.wait_started()
        assert "on cpu with 2 ranks" in job.log(0)
        (only,) = job.log(1).splitlines()
        assert "process 1 of 2 from srun runs ranks for rank 0" in only
        assert ask(port) == expected
        job.cancel()
        wait_for(lambda: not job.queued(), 60)
        wait_for(lambda: not job.processes())
    finally:
        small_slurm.cancel_jobs()


def test_killing_the_servers_by_name_leaves_nothing(job):
    """`pgrep tritonserver | xargs kill -9`, here without servers of others."""
    job.wait_started()
    listed = subprocess.run(["pgrep", "tritonserver"], capture_output=True, text=True).stdout
    servers = {int(word) for word in listed.split()} & set(job.processes())
    assert len(servers) == TASKS
    subprocess.run(
        ["xargs", "kill", "-9"], input=" ".join(map(str, servers)), text=True, check=True
    )
    wait_for(lambda: not any(map(is_running, servers)))
    wait_for(lambda: not job.queued(), 60)
    wait_for(lambda: not job.processes())
