"""A server over two "machines": two addresses of this one, and the variables of a launcher."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from real_server import RealServer, limit_cache
from run_rank_host import ADDRESS, KEY
from tiny_server import children_of, command_of

from slipstream.repository.templates import write_repository

MODEL = "tiny"
PROMPT = "5 6 7"
PENALTY = {"repetition_penalty": 1.3}
TRITONSERVER = ("-m", "slipstream.cli.compat.tritonserver")
SLIPSTREAM = ("-m", "slipstream.cli.main", "start")


def mpirun(rank: int) -> dict[str, str]:
    """Return the variables of one of two processes, each on a machine of its own."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }


def srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "node[001-002]",
        "SLURM_JOB_ID": "30017",
    }


def torchrun(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def leader_worker_set(rank: int) -> dict[str, str]:
    return {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": ADDRESS}


LAUNCHERS = {
    "mpirun": mpirun,
    "srun": srun,
    "torchrun": torchrun,
    "LeaderWorkerSet": leader_worker_set,
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port: int = taken.getsockname()[1]
        return port


class Cluster:
    """A server as two processes of a launcher, each the only one on its machine."""

    def __init__(
        self,
        folder: Path,
        engine: Path,
        *flags: str,
        launcher: str = "mpirun",
        program: Sequence[str] = TRITONSERVER,
    ) -> None:
        """flags: besides the repository and the addresses"""
        self._folder = folder
        self._flags = flags
        self._launcher = launcher
        self._program = program
        self._repository = folder / "repository"
        write_repository(self._repository, MODEL, engine, engine, 64)
        limit_cache(self._repository, 4096)
        self._port = free_port()
        self.host = self.start(1)
        self.leader = self.start(0).wait()

    def start(self, rank: int) -> RealServer:
        """Start a process. The name of its folder is its rank and the number of its start."""
        folder = self._folder / f"{rank}.{len(list(self._folder.iterdir()))}"
        variables = {
            **LAUNCHERS[self._launcher](rank),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self._port),
            "SLIPSTREAM_CLUSTER_KEY": KEY,
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = (*self._program, *self._repository_flags(), *self._flags)
        return RealServer(self._repository, folder, *command, variables=variables)

    def _repository_flags(self) -> list[str]:
        if self._program == TRITONSERVER:
            addresses = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
            return [f"--model-repository={self._repository}", *addresses]
        return ["--repo", str(self._repository), "--dtype", "float32"]

    def post(self, route: str, tokens: int, prompt: str = PROMPT) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.leader.http, timeout=60)
        body = {"text_input": prompt, "max_tokens": tokens, "end_id": 95, **PENALTY}
        body["stream"] = route.endswith("stream")
        connection.request("POST", f"/v2/models/{MODEL}/{route}", json.dumps(body))
        return connection.getresponse()

    def ask(self, prompt: str = PROMPT) -> str:
        response = self.post("generate", 24, prompt)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        text: str = answer["text_output"]
        return text

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.leader.http, timeout=60)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200

    def ranks_of(self, server: RealServer) -> list[int]:
        """Return the processes of the ranks that this process has started."""
        return [
            child
            for child in children_of(server.process_id)
            if "engine_worker.process" in command_of(child)
        ]

    def frontends(self) -> list[int]:
        """Return the processes of the secondary front ends."""
        children = children_of(self.leader.process_id)
        return [child for child in children if "frontends" in command_of(child)]

    def rank_of(self, server: RealServer) -> int:
        """Return the process of the only rank that this process has started."""
        (found,) = self.ranks_of(server)
        return found

    def close(self) -> None:
        self.leader.close()
        self.host.close()
