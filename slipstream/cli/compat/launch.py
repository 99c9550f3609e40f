"""`slipstream launch`: the old scripts/launch_triton_server.py. Starts the server in the background
and returns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser

_PROGRAM = "tritonserver"


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    _refuse_second(given.force)
    _explain(given)
    environment = {**os.environ, **_environment(given)}
    process = subprocess.Popen(server_command(given), env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=0.2)  # a mistake in the command line shows at once
    except subprocess.TimeoutExpired:
        return 0  # it runs; whoever needs it asks its health
    raise CommandError(f"the server ended at once, with code {code}")


def _parser() -> Parser:
    parser = Parser(
        "slipstream launch", description="Start a server for a model repository, in the background."
    )
    parser.add_argument(
        "--world_size", type=int, default=1, help="Ranks; one server is started whatever it says."
    )
    parser.add_argument(
        "--tritonserver", help="The server program; default: the one installed with slipstream."
    )
    parser.add_argument("--model_repo", default=None, help="The model repository.")
    parser.add_argument("--grpc_port", default="8001", help="gRPC.")
    parser.add_argument("--http_port", default="8000", help="HTTP.")
    parser.add_argument("--metrics_port", default="8002", help="Metrics.")
    parser.add_argument(
        "-f", "--force", action="store_true", help="Start even if a tritonserver is busy already."
    )
    parser.add_argument("--log", action="store_true", help="Write a verbose log to --log-file.")
    parser.add_argument("--log-file", default="triton_log.txt", help="With --log: where to.")
    parser.add_argument(
        "--tensorrt_llm_model_name", default="tensorrt_llm", help="No effect: there is one rank."
    )
    parser.add_argument(
        "--multi-model", action="store_true", help="Several engine models in one repository."
    )
    parser.add_argument("--disable-spawn-processes", action="store_true", help="No effect.")
    parser.add_argument(
        "--multimodal_gpu0_cuda_mem_pool_bytes",
        type=int,
        default=0,
        help="Passed on as --cuda-memory-pool-byte-size=0:N.",
    )
    parser.add_argument(
        "--oversubscribe", action="store_true", help="No effect: mpirun is not used."
    )
    parser.add_argument("--no-mpi", action="store_true", help="No effect: mpirun is not used.")
    parser.add_argument("--trtllm_llmapi_launch", action="store_true", help="No effect.")
    parser.add_argument(
        "--exit_timeout",
        type=int,
        default=None,
        help="Seconds that running requests get at the end.",
    )
    return parser


def server_command(given: Namespace) -> list[str]:
    command = [*_program(given.tritonserver), f"--model-repository={_repository(given.model_repo)}"]
    if given.log:
        command += ["--log-verbose=3", f"--log-file={given.log_file}"]
    command += [
        f"--grpc-port={given.grpc_port}",
        f"--http-port={given.http_port}",
        f"--metrics-port={given.metrics_port}",
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    ]
    if given.exit_timeout is not None:
        command.append(f"--exit-timeout-secs={given.exit_timeout}")
    if given.multimodal_gpu0_cuda_mem_pool_bytes:
        command.append(
            f"--cuda-memory-pool-byte-size=0:{given.multimodal_gpu0_cuda_mem_pool_bytes}"
        )
    return command


def _program(given: str | None) -> list[str]:
    """The program that was named; else ours, beside this interpreter or on the path; else the
    module itself.
    """
    if given:
        if shutil.which(given) is None:
            raise CommandError(
                f"--tritonserver {given}: no such program; leave the option out to use slipstream's own"
            )
        return [given]
    beside = Path(sys.executable).with_name(_PROGRAM)
    found = str(beside) if beside.is_file() else shutil.which(_PROGRAM)
    return [found] if found else [sys.executable, "-m", "slipstream.cli.compat.tritonserver"]


def _repository(given: str | None) -> Path:
    """Without one: the gpt repository of the workspace that the script is in, as it always was."""
    repository = (
        Path(given) if given else Path(sys.argv[0]).resolve().parent.parent / "all_models" / "gpt"
    )
    if not repository.is_dir():
        raise CommandError(f"--model_repo {repository}: no such folder")
    return repository


def _refuse_second(force: bool) -> None:
    busy = busy_servers()
    if busy and not force:
        raise CommandError(
            f"{_PROGRAM} runs already (process {', '.join(map(str, busy))}); stop it with "
            f"`pkill {_PROGRAM}`, or start one more with --force"
        )


def busy_servers(processes: Path = Path("/proc")) -> list[int]:
    """Servers that are computing at this moment, as `pgrep -r R tritonserver` finds them; a waiting
    one passes.
    """
    found = []
    for status in processes.glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # it ended meanwhile
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == _PROGRAM and rest.split()[0] == "R":
            found.append(int(status.parent.name))
    return sorted(found)


def _environment(given: Namespace) -> dict[str, str]:
    if not given.multi_model:
        return {}
    if given.world_size > 1:
        raise CommandError("--multi-model and --world_size over 1 exclude each other")
    return {
        "TRTLLM_ORCHESTRATOR": "1",
        **({"TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"} if given.disable_spawn_processes else {}),
    }


def _explain(given: Namespace) -> None:
    if given.world_size < 1:
        raise CommandError(f"--world_size must be at least 1, not {given.world_size}")
    if given.world_size > 1:
        print(
            f"[INFO] --world_size {given.world_size}: one server is started, which starts its engines itself",
            flush=True,
        )
