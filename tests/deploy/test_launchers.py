"""mpirun and srun start a server: one answers, the other processes wait, nothing is left behind.

apt-get install openmpi-bin slurm-wlm munge
pytest -m cluster tests/deploy/test_launchers.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from real_server import limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import wait_for

from slipstream.llm import LLM
from slipstream.repository.templates import write_repository

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
STARTED = re.compile(r"Started HTTPService at [^ ]*:(\d+)")
SERVER = (sys.executable, "-m", "slipstream.cli.compat.tritonserver")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")
PROMPT = "5 6 7"
CPU = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="module")
def repository(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository") / "models"
    write_repository(folder, "tiny", engine, engine, 64)
    limit_cache(folder, 4096)
    return folder


@pytest.fixture(scope="module")
def expected(engine: Path) -> str:
    with LLM(engine, device="cpu", cache_tokens=1024, threads=1) as llm:
        return llm.generate(PROMPT, max_tokens=8, ignore_end=True)[0].text


class Launch:
    """A running launcher."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] = CPU) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def answer(self) -> str:
        """Return the answer of the server once it serves."""

        def started() -> bool:
            assert self.process.poll() is None, self.log()[-3000:]
            return STARTED.search(self.log()) is not None

        wait_for(started, 90)
        port = STARTED.findall(self.log())[0]
        body = {"text_input": PROMPT, "max_tokens": 8, "end_id": 95}
        url = f"http://127.0.0.1:{port}/v2/models/tiny/generate"
        found = httpx.post(url, json=body, timeout=60)
        assert found.status_code == 200, found.text
        text: str = json.loads(found.text)["text_output"]
        return text

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    running: list[Launch] = []

    def start(command: list[str], environment: dict[str, str] = CPU) -> Launch:
        running.append(Launch(command, tmp_path / f"log{len(running)}", environment))
        return running[-1]

    yield start
    for one in running:
        one.close()


def server_command(repository: Path, *flags: str) -> list[str]:
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    return [*SERVER, f"--model-repository={repository}", *ports, *flags]


def processes_of(repository: Path) -> list[str]:
    """Return the command lines of processes that name the repository or its engine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(repository.parents[1]) in line and "pytest" not in line:
            found.append(line)
    return found


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
needs_slurm = pytest.mark.skipif(shutil.which("slurmd") is None, reason="Slurm is not installed")


@needs_mpirun
def test_mpirun_starts_one_server(launch, repository, expected):
    running = launch([*MPIRUN, "-n", "2", *server_command(repository)])
    assert running.answer() == expected
    assert running.log().count("Started HTTPService") == 1
    assert "rank 1 of 2 from mpirun serves nothing and waits" in running.log()
    assert "tensorrt_llm was started for 2 ranks, which need as many GPUs" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_mpirun
def test_the_form_with_one_command_per_rank_runs_two_ranks(launch, repository, expected):
    """As upstream's launch script prints it, here with ranks on a CPU."""
    first = ["-n", "1", *server_command(repository, "--ranks=2")]
    second = ["-n", "1", *server_command(repository, "--model-control-mode=explicit")]
    running = launch([*MPIRUN, *first, ":", *second, "--load-model=tensorrt_llm"])
    assert running.answer() == expected
    assert "on cpu with 2 ranks" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Slurm of two nodes on this machine; return its environment."""
    if shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed")
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    cluster = SmallSlurm(folder)
    cluster.start()
    yield CPU | {"SLURM_CONF": str(folder / "slurm.conf")}
    cluster.stop()


class SmallSlurm:
    """munged, slurmctld and two slurmd in one folder, as root."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        folder = self._folder
        for name in ("state", "log", "run", "munge"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "run").chmod(0o755)
        (folder / "munge").chmod(0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(self._configuration())
        self._run(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/run/munge.socket", f"--pid-file={folder}/run/munged.pid",
            f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/run/munge.seed",
        )  # fmt: skip
        wait_for(lambda: (folder / "run" / "munge.socket").exists())
        configuration = str(folder / "slurm.conf")
        self._run("slurmctld", "-D", "-f", configuration)
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node, "-f", configuration)
        wait_for(self._idle, 60)

    def _run(self, *command: str) -> None:
        log = (self._folder / "log" / f"{command[0]}{len(self._started)}").open("wb")
        with log:
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _idle(self) -> bool:
        environment = os.environ | {"SLURM_CONF": str(self._folder / "slurm.conf")}
        found = subprocess.run(
            ["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True
        )
        return found.stdout.split() == ["idle"]

    def stop(self) -> None:
        for process in self._started:
            process.kill()  # nodes would wait for the controller, and it for them
            process.wait()
        shutil.rmtree(self._folder)

    def _configuration(self) -> str:
        host = socket.gethostname().partition(".")[0]
        ports = [_free_port() for _ in range(3)]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "RealMemory=1000 State=UNKNOWN"
            for name, port in zip(("n1", "n2"), ports[1:], strict=True)
        )
        folder = self._folder
        return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdParameters=config_overrides
{nodes}
PartitionName=luna Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@needs_slurm
def test_srun_starts_one_server(launch, slurm, repository, expected):
    command = ["srun", "-N1", "-n2", "--overcommit", *server_command(repository, "--ranks=2")]
    running = launch(command, slurm)
    assert running.answer() == expected
    assert running.log().count("Started HTTPService") == 1
    assert "rank 1 of 2 from srun serves nothing and waits" in running.log()
    assert "on cpu with 2 ranks" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
def test_tasks_on_a_second_machine_are_reported(launch, slurm, repository, expected):
    command = ["srun", "-N2", "--ntasks-per-node=1", *server_command(repository)]
    running = launch(command, slurm)
    assert running.answer() == expected
    assert "srun started 1 of 2 ranks on other machines, which are not used" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
def test_a_batch_script_is_cancelled_without_remains(slurm, repository, expected, tmp_path):
    """The script of tutorial 002, with the flags of a test."""
    log = tmp_path / "log"
    script = tmp_path / "tensorrt_llm_triton.sub"
    server = " ".join(server_command(repository))
    script.write_text(
        "#!/bin/bash\n#SBATCH -o /dev/null\n#SBATCH -N1\n#SBATCH --ntasks-per-node=2\n"
        f"#SBATCH -A account -p luna\nsrun --mpi=none --overcommit --output={log} {server}\n"
    )
    submitted = subprocess.run(
        ["sbatch", str(script)], env=slurm, capture_output=True, text=True, check=True
    )
    job = submitted.stdout.split()[-1]
    wait_for(lambda: log.exists() and STARTED.search(log.read_text()) is not None, 90)
    port = STARTED.findall(log.read_text())[0]
    url = f"http://127.0.0.1:{port}/v2/models/tiny/generate"
    body = {"text_input": PROMPT, "max_tokens": 8, "end_id": 95}
    assert httpx.post(url, json=body, timeout=60).json()["text_output"] == expected
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_for(lambda: not processes_of(repository), 60)

    def is_gone() -> bool:
        queue = subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, text=True)
        return queue.returncode == 0 and not queue.stdout.strip()

    wait_for(is_gone, 60)
