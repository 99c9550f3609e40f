"""The scripts of deploy/slurm on a Slurm of two nodes on this machine.

apt-get install slurm-wlm munge
pytest -m cluster tests/deploy/test_slurm_scripts.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from free_ports import free_range
from manifests import DEPLOY
from real_server import limit_cache
from test_launchers import CPU, SmallSlurm
from tiny_engine import build_tiny_engine
from tiny_server import wait_for

from slipstream.repository.templates import write_repository

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("slurmd") is None, reason="Slurm is not installed"),
]

STARTED = re.compile(r"Started HTTPService at [^ ]*:(\d+)")
SCRIPTS = DEPLOY / "slurm"
BODY = {"text_input": "5 6 7", "max_tokens": 8, "end_id": 95}


class GpuSlurm(SmallSlurm):
    """A Slurm whose nodes count GPUs that they do not have."""

    def start(self) -> None:
        devices = self._folder / "devices"
        devices.mkdir(parents=True)
        for number in range(8):
            (devices / f"gpu{number}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={devices}/gpu[0-7]\n")
        super().start()

    def _configuration(self) -> str:
        text = super()._configuration().replace("CPUs=4", "CPUs=16 Gres=gpu:8")
        return f"GresTypes=gpu\n{text}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = Path("/tmp") / f"slurm-scripts-{os.getpid()}"
    slurm = GpuSlurm(folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        slurm.start()
        yield CPU | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    finally:
        slurm.stop()


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    engine = build_tiny_engine(folder)
    write_repository(folder / "repository", "tiny", engine, engine, 64)
    limit_cache(folder / "repository", 4096)
    return folder / "repository"


class Job:
    def __init__(
        self, script: str, folder: Path, environment: dict[str, str], *options: str
    ) -> None:
        self._environment = environment
        self._folder = folder
        (folder / "logs").mkdir()
        (folder / "upstreams").mkdir()
        command = ["sbatch", "--parsable", *options, str(SCRIPTS / script)]
        self.number = self._run(*command).strip()

    def _run(self, *command: str) -> str:
        return subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def logs(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self._folder / "logs").iterdir()}

    def ports(self) -> list[int]:
        return [int(port) for text in self.logs().values() for port in STARTED.findall(text)]

    def wait_served(self, servers: int = 1) -> list[int]:
        """Return the HTTP ports of the job's servers once all answer."""
        wait_for(lambda: len(self.ports()) == servers or not self.queued(), 120)
        assert self.queued(), self.logs()
        return self.ports()

    def queued(self) -> bool:
        return bool(self._run("squeue", "-h", "-j", self.number).strip())

    def cancel(self) -> None:
        self._run("scancel", self.number)
        wait_for(lambda: not self.queued(), 60)


def ask(port: int) -> str:
    url = f"http://127.0.0.1:{port}/v2/models/tiny/generate"
    found = httpx.post(url, json=BODY, timeout=60)
    assert found.status_code == 200, found.text
    text: str = found.json()["text_output"]
    return text


def test_one_node_serves_and_is_cancelled(environment, repository, tmp_path):
    # two tasks in place of eight: this machine has two cores
    settings = environment | {"MODEL_REPOSITORY": str(repository)}
    job = Job("one_node.sub", tmp_path, settings, "--ntasks-per-node=2")
    (port,) = job.wait_served()
    assert len(ask(port).split()) == 8
    names = [f"slipstream_{job.number}{suffix}.out" for suffix in ("", "_0", "_1")]
    assert sorted(job.logs()) == sorted(names)
    assert "Started HTTPService" in job.logs()[names[1]]
    job.cancel()


def test_two_nodes_start_one_server(environment, repository, tmp_path):
    settings = environment | {"MODEL_REPOSITORY": str(repository), "RANKS": "2"}
    job = Job("two_nodes.sub", tmp_path, settings)
    (port,) = job.wait_served()
    assert len(ask(port).split()) == 8
    first, second = (job.logs()[f"slipstream_{job.number}_{task}.out"] for task in (0, 1))
    assert "on cpu with 2 ranks" in first
    assert "Started" not in second
    job.cancel()


def test_replicas_are_listed_for_nginx_while_they_run(environment, repository, tmp_path):
    first = free_range(6)
    settings = environment | {"MODEL_REPOSITORY": str(repository), "FIRST_PORT": str(first)}
    job = Job("replicas.sub", tmp_path, settings, "--array=0-1")
    ports = job.wait_served(2)
    assert sorted(ports) == [first, first + 3]
    assert len({ask(port) for port in ports}) == 1
    upstreams = {path.name: path.read_text() for path in (tmp_path / "upstreams").iterdir()}
    assert sorted(upstreams) == ["0.conf", "1.conf"]
    assert re.fullmatch(rf"server \S+:{first + 3} max_fails=0;\n", upstreams["1.conf"])
    job.cancel()
    wait_for(lambda: not list((tmp_path / "upstreams").iterdir()))


def test_a_script_needs_the_repository(environment, tmp_path):
    job = Job("one_node.sub", tmp_path, environment, "--ntasks-per-node=1")
    wait_for(lambda: not job.queued(), 60)
    assert "MODEL_REPOSITORY" in job.logs()[f"slipstream_{job.number}.out"]
