"""mpirun, srun, sbatch and torchrun start a server, on one machine and on two: one process answers,
and nothing is left behind.

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
from tiny_server import parent_of, wait_for

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
def repository(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("repository") / "models"
    write_repository(folder, "tiny", engine, engine, 64)
    limit_cache(folder, 4096)
    yield folder
    for process in processes_of(folder):  # of tests that failed
        os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(engine: Path) -> str:
    with LLM(engine, device="cpu", cache_tokens=1024, threads=1) as llm:
        return llm.generate(PROMPT, max_tokens=8, ignore_end=True)[0].text


@pytest.fixture(scope="module")
def two_ranks(engine: Path) -> str:
    """Return the answer of two ranks. Their 16-bit sums may differ from those of one rank."""
    with LLM(engine, device="cpu", cache_tokens=1024, threads=1, ranks=2) as llm:
        return llm.generate(PROMPT, max_tokens=8, ignore_end=True)[0].text


def ask(port: str) -> str:
    body = {"text_input": PROMPT, "max_tokens": 8, "end_id": 95}
    found = httpx.post(f"http://127.0.0.1:{port}/v2/models/tiny/generate", json=body, timeout=60)
    assert found.status_code == 200, found.text
    text: str = json.loads(found.text)["text_output"]
    return text


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
        return ask(STARTED.findall(self.log())[0])

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


def processes_of(repository: Path) -> list[Path]:
    """Return the folders in /proc of processes whose command names the repository or its engine.

    The command of pytest, or of a shell that runs it, names the folder after --basetemp.
    """
    own = own_processes()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) in own:
            continue
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(repository.parents[1]) in line:
            found.append(path)
    return found


def own_processes() -> set[int]:
    """Return this process and those that it descends from."""
    found: set[int] = set()
    process = os.getpid()
    while process > 0:
        found.add(process)
        process = parent_of(process)
    return found


def environments_of(repository: Path) -> list[dict[str, str]]:
    """Return the environments of the processes of a server."""
    texts = [(path / "environ").read_text() for path in processes_of(repository)]
    return [
        dict(entry.partition("=")[::2] for entry in text.split("\0") if entry) for text in texts
    ]


CLUSTER_KEY = {"SLIPSTREAM_CLUSTER_KEY": "the key of all ranks in a test"}
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
def small_slurm() -> Iterator[SmallSlurm]:
    """Start a Slurm of two nodes on this machine."""
    if shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed")
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    cluster = SmallSlurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(small_slurm: SmallSlurm) -> Iterator[dict[str, str]]:
    """Return the environment of a Slurm. A test that fails leaves no job to the next one."""
    yield CPU | small_slurm.environment
    small_slurm.cancel_jobs()


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
        return self.ask("sinfo", "-h", "-o", "%t").split() == ["idle"]

    def cancel_jobs(self) -> None:
        """Cancel the jobs that are left, as a test that fails leaves them."""

        def are_gone() -> bool:
            self.ask("scancel", "--user=root")
            return not self.ask("squeue", "-h").strip()

        wait_for(are_gone, 60)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        environment = os.environ | self.environment
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        return found.stdout

    def stop(self) -> None:
        for process in self._started:
            process.kill()  # nodes would wait for the controller, and it for them
            process.wait()
        # a job of PMIx that ends removes its own folder meanwhile
        shutil.rmtree(self._folder, ignore_errors=True)

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


TWO_NODES = ("srun", "-N2", "--overcommit")


@needs_slurm
def test_two_nodes_without_a_cluster_key_are_an_error(launch, slurm, repository):
    running = launch([*TWO_NODES, "--ntasks-per-node=1", *server_command(repository)], slurm)
    assert running.process.wait(60) == 1
    assert "ranks on several machines need a cluster key" in running.log()


@needs_slurm
@pytest.mark.parametrize("tasks", [1, 2])
def test_srun_serves_over_two_nodes(launch, slurm, repository, two_ranks, tasks):
    """The nodes' names do not resolve: the address of the machine that started srun is taken."""
    command = [*TWO_NODES, f"--ntasks-per-node={tasks}", *server_command(repository)]
    running = launch(command, slurm | CLUSTER_KEY)
    assert running.answer() == two_ranks
    assert running.log().count("Started HTTPService") == 1
    ranks = 2 * tasks
    assert f"rank 0 of {ranks} from srun waits for the others at 127.0.0.1:2" in running.log()
    for rank in range(1, ranks):
        assert f"process {rank} of {ranks} from srun runs ranks for rank 0" in running.log()
    assert f"on cpu with {ranks} ranks" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
def test_two_replicas_run_on_two_nodes(launch, slurm, repository, expected):
    command = [*TWO_NODES, "--ntasks-per-node=1", *server_command(repository, "--replicas=2")]
    running = launch(command, slurm | CLUSTER_KEY)
    assert running.answer() == expected
    assert "are started by the processes 0, 1 of 2 from srun" in running.log()
    engines = processes_with(repository, "slipstream.engine_worker.process")
    assert sorted(found["SLURMD_NODENAME"] for _, found in engines) == ["n1", "n2"]
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_killed_task_ends_the_job_of_two_nodes(launch, slurm, repository, two_ranks, victim):
    """With --kill-on-bad-exit, as in deploy/slurm/two_nodes.sub."""
    command = [*TWO_NODES, "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    running = launch([*command, *server_command(repository)], slurm | CLUSTER_KEY)
    assert running.answer() == two_ranks
    (task,) = [
        process
        for process, found in processes_with(repository, SERVER[-1])
        if found["SLURM_PROCID"] == victim
    ]
    os.kill(task, signal.SIGKILL)
    assert running.process.wait(60) != 0
    wait_for(lambda: not processes_of(repository))
    assert "Killed" in running.log()


def processes_with(repository: Path, module: str) -> list[tuple[int, dict[str, str]]]:
    """Return the processes of a job's tasks that run a module, with their environments."""
    found = []
    for path in processes_of(repository):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            text = (path / "environ").read_text()
        except OSError:
            continue
        environment = dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)
        if module in words and "SLURMD_NODENAME" in environment:
            found.append((int(path.name), environment))
    return found


@needs_slurm
def test_rank_0_on_the_second_node_is_found_by_master_addr(
    launch, slurm, repository, two_ranks, tmp_path
):
    order = tmp_path / "hosts"
    order.write_text("n2\nn1\n")
    variables = {"SLURM_HOSTFILE": str(order), "MASTER_ADDR": "127.0.0.2"}
    command = ["srun", "-N2", "-n2", "--distribution=arbitrary", "-l", *server_command(repository)]
    running = launch(command, slurm | CLUSTER_KEY | variables)
    assert running.answer() == two_ranks
    assert "rank 0 of 2 from srun waits for the others at 127.0.0.2:2" in running.log()
    nodes = {
        found.get("SLURM_PROCID"): found.get("SLURMD_NODENAME")
        for found in environments_of(repository)
    }
    assert (nodes["0"], nodes["1"]) == ("n2", "n1")
    running.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
def test_a_batch_script_serves_over_two_nodes_and_is_cancelled(
    slurm, repository, two_ranks, tmp_path
):
    """The script of tutorial 002 with two nodes, and a log for each task as it has."""
    script = (
        "#!/bin/bash\n#SBATCH -o /dev/null\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
        "#SBATCH -A account -p luna\n"
        f"srun --mpi=none --output={tmp_path}/%t.out {' '.join(server_command(repository))}\n"
    )
    log = tmp_path / "0.out"
    job = submit_job(script, tmp_path, slurm | CLUSTER_KEY)
    assert ask_started(log) == two_ranks
    lines = (tmp_path / "1.out").read_text().splitlines()
    assert len(lines) == 1  # ranks above 0 write one line, and then problems only
    cancel_job(job, slurm, repository)


@needs_mpirun
def test_mpirun_with_one_command_per_rank_on_two_machines(launch, repository, two_ranks):
    """As upstream's script prints it. mpirun's own two machines would need ssh."""
    machine = ["-n", "1", "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1"]
    first = [*machine, *server_command(repository, "--ranks=2")]
    second = [*machine, *server_command(repository, "--model-control-mode=explicit")]
    running = launch(
        [*MPIRUN, *first, ":", *second, "--load-model=tensorrt_llm"], CPU | CLUSTER_KEY
    )
    assert running.answer() == two_ranks
    assert "process 1 of 2 from mpirun runs ranks for rank 0 at" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python")


def test_torchrun_on_one_machine_starts_one_server(launch, repository, two_ranks):
    port = _free_port()
    flags = ["--nproc-per-node=2", f"--master-port={port}"]
    running = launch([*TORCHRUN, *flags, *server_command(repository, "--ranks=2")])
    assert running.answer() == two_ranks
    assert "rank 1 of 2 from torchrun serves nothing and waits" in running.log()
    running.end()
    wait_for(lambda: not processes_of(repository))


def test_torchrun_on_two_machines_serves_over_both(launch, repository, two_ranks):
    flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.2"]
    flags.append(f"--master-port={_free_port()}")
    first, _ = (
        launch(
            [*TORCHRUN, *flags, f"--node-rank={node}", *server_command(repository)],
            CPU | CLUSTER_KEY,
        )
        for node in range(2)
    )
    assert first.answer() == two_ranks
    assert "rank 0 of 2 from torchrun waits for the others at 127.0.0.2" in first.log()
    first.end()
    wait_for(lambda: not processes_of(repository))


@needs_slurm
def test_a_batch_script_is_cancelled_without_remains(slurm, repository, expected, tmp_path):
    """The script of tutorial 002, with the flags of a test."""
    log = tmp_path / "log"
    server = " ".join(server_command(repository))
    script = (
        "#!/bin/bash\n#SBATCH -o /dev/null\n#SBATCH -N1\n#SBATCH --ntasks-per-node=2\n"
        f"#SBATCH -A account -p luna\nsrun --mpi=none --overcommit --output={log} {server}\n"
    )
    job = submit_job(script, tmp_path, slurm)
    assert ask_started(log) == expected
    cancel_job(job, slurm, repository)


def submit_job(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Submit a batch script and return the number of its job."""
    path = folder / "tensorrt_llm_triton.sub"
    path.write_text(script)
    submitted = subprocess.run(
        ["sbatch", str(path)], env=environment, capture_output=True, text=True, check=True
    )
    return submitted.stdout.split()[-1]


def ask_started(log: Path) -> str:
    """Return the answer of the server of a job, once it serves."""
    wait_for(lambda: log.exists() and STARTED.search(log.read_text()) is not None, 90)
    return ask(STARTED.findall(log.read_text())[0])


def cancel_job(job: str, environment: dict[str, str], repository: Path) -> None:
    """Cancel a job, and wait until nothing of it is left."""
    subprocess.run(["scancel", job], env=environment, check=True)
    wait_for(lambda: not processes_of(repository), 60)

    def is_gone() -> bool:
        queue = subprocess.run(["squeue", "-h"], env=environment, capture_output=True, text=True)
        return queue.returncode == 0 and not queue.stdout.strip()

    wait_for(is_gone, 60)
