"""`slipstream launch`: the old launch_triton_server.py. Starts a server in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import (
    FRONTENDS_HELP,
    NO_EFFECT,
    RANKS_HELP,
    REPLICAS_HELP,
    CommandError,
    Parser,
    at_least,
    frontend_count,
)
from slipstream.cli.log import log, program
from slipstream.server.engine_link.launched import WORLD_SIZE_VARIABLE

_PROGRAM = "tritonserver"


def create_parser() -> Parser:
    parser = Parser("slipstream launch", "Start a server for a model repository in the background.")
    parser.add_argument(
        "--model_repo",
        metavar="FOLDER",
        help="Model repository (default: all_models/gpt of the workspace that holds the script).",
    )
    for name, service, port in (
        ("grpc", "gRPC", "8001"),
        ("http", "HTTP", "8000"),
        ("metrics", "metrics", "8002"),
    ):
        parser.add_argument(
            f"--{name}_port", default=port, metavar="PORT", help=f"Port for {service}."
        )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="IP address to listen on; 0.0.0.0: reachable from other machines.",
    )
    parser.add_argument(
        "--tritonserver",
        metavar="PROGRAM",
        help="Server program to run (default: the tritonserver of slipstream).",
    )
    parser.add_argument(
        "-f",
        "--force",
        action="store_true",
        help="Start even if a busy tritonserver is running.",
    )
    _add_server_options(parser)
    _add_ignored(parser)
    return parser


def _add_server_options(parser: Parser) -> None:
    parser.add_argument("--log", action="store_true", help="Write a verbose log to --log-file.")
    parser.add_argument("--log-file", default="triton_log.txt", help="File for --log.")
    parser.add_argument(
        "--exit_timeout",
        type=int,
        metavar="SECONDS",
        help="At exit, wait this long for running requests to finish (default: 30).",
    )
    parser.add_argument(
        "--frontends",
        type=frontend_count,
        metavar="N",
        help=f"{FRONTENDS_HELP} (default: auto).",
    )
    parser.add_argument("--replicas", type=at_least(1, int), metavar="N", help=f"{REPLICAS_HELP}.")
    parser.add_argument("--ranks", type=at_least(1, int), metavar="N", help=f"{RANKS_HELP}.")
    parser.add_argument(
        "--world_size",
        type=int,
        default=1,
        metavar="RANKS",
        help="Run engines with up to this many ranks, if there are as many GPUs. One server is "
        "started, which starts the ranks itself.",
    )
    parser.add_argument(
        "--multi-model",
        action="store_true",
        help="Allow several engine models in one repository.",
    )
    parser.add_argument(
        "--multimodal_gpu0_cuda_mem_pool_bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="Passed to the server as --cuda-memory-pool-byte-size=0:BYTES.",
    )


def _add_ignored(parser: Parser) -> None:
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "--tensorrt_llm_model_name", default="tensorrt_llm", help="Ranks are not started by name."
    )
    for name in ("--oversubscribe", "--no-mpi"):
        ignored.add_argument(name, action="store_true", help="mpirun is not used.")
    ignored.add_argument(
        "--disable-spawn-processes",
        action="store_true",
        help="Allows --world_size over 1 with --multi-model. No further processes are started.",
    )
    ignored.add_argument("--trtllm_llmapi_launch", action="store_true", help=NO_EFFECT)


def run(given: Namespace) -> int:
    _check_ranks(given)
    _refuse_second(given.force)
    environment = {**os.environ, **_environment(given)}
    process = subprocess.Popen(server_command(given), env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=0.2)  # long enough to notice a wrong command line
    except subprocess.TimeoutExpired:
        log("INFO", f"Stop it with: {program()} stop {process.pid}")
        return 0
    raise CommandError(f"the server ended at once, with code {code}")


def server_command(given: Namespace) -> list[str]:
    command = [*_program(given.tritonserver), f"--model-repository={_repository(given.model_repo)}"]
    if given.log:
        command += ["--log-verbose=3", f"--log-file={given.log_file}"]
    command += [
        f"--grpc-port={given.grpc_port}",
        f"--http-port={given.http_port}",
        f"--metrics-port={given.metrics_port}",
        f"--http-address={given.address}",  # metrics follow it
        f"--grpc-address={given.address}",
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    ]
    if given.frontends is not None:
        command.append(f"--frontends={given.frontends or 'auto'}")
    if given.replicas is not None:
        command.append(f"--replicas={given.replicas}")
    if given.ranks is not None:
        command.append(f"--ranks={given.ranks}")
    if given.exit_timeout is not None:
        command.append(f"--exit-timeout-secs={given.exit_timeout}")
    if given.multimodal_gpu0_cuda_mem_pool_bytes:
        command.append(
            f"--cuda-memory-pool-byte-size=0:{given.multimodal_gpu0_cuda_mem_pool_bytes}"
        )
    return command


def _program(given: str | None) -> list[str]:
    """Return the command that starts the server: --tritonserver, else the installed program."""
    if given:
        if shutil.which(given) is None:
            raise CommandError(
                f"--tritonserver {given}: no such program; "
                "leave the option out to use slipstream's own"
            )
        return [given]
    beside = Path(sys.executable).with_name(_PROGRAM)
    found = str(beside) if beside.is_file() else shutil.which(_PROGRAM)
    return [found] if found else [sys.executable, "-m", "slipstream.cli.compat.tritonserver"]


def _repository(given: str | None) -> Path:
    """Return the repository to serve. As in the old script, the default is the gpt repository."""
    workspace = Path(sys.argv[0]).resolve().parent.parent
    repository = Path(given) if given else workspace / "all_models" / "gpt"
    if not repository.is_dir():
        raise CommandError(f"--model_repo {repository}: no such folder")
    return repository


def _refuse_second(force: bool) -> None:
    busy = busy_servers()
    if busy and not force:
        raise CommandError(
            f"{_PROGRAM} runs already (process {', '.join(map(str, busy))}); stop it with "
            f"`{program()} stop`, or start one more with --force"
        )


def busy_servers(processes: Path = Path("/proc")) -> list[int]:
    """Return the ids of server processes that are running at this moment, not waiting.

    The old script used `pgrep -r R tritonserver`.
    """
    found = []
    for status in processes.glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # the process has ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == _PROGRAM and rest.split()[0] == "R":
            found.append(int(status.parent.name))
    return sorted(found)


def _environment(given: Namespace) -> dict[str, str]:
    if not given.multi_model:
        return {WORLD_SIZE_VARIABLE: str(given.world_size)}
    # The world size counts the processes of all models, so it is not the ranks of each of them.
    found = {WORLD_SIZE_VARIABLE: "1", "TRTLLM_ORCHESTRATOR": "1"}
    if given.disable_spawn_processes:
        found["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] = "0"
    return found


def _check_ranks(given: Namespace) -> None:
    if given.world_size < 1:
        raise CommandError(f"--world_size must be at least 1, not {given.world_size}")
    if given.world_size == 1:
        return
    ranks = "the ranks of its engines itself"
    if given.multi_model:
        if not given.disable_spawn_processes:
            raise CommandError(
                f"--multi-model with --world_size {given.world_size} needs "
                "--disable-spawn-processes, as in the old script; or leave --world_size out: the "
                "server starts the ranks of each engine itself"
            )
        ranks = (
            "as many ranks for each engine as it was built for; the other "
            f"{given.world_size - 1} processes are not needed"
        )
    print(
        f"[INFO] --world_size {given.world_size}: one server is started, which starts {ranks}",
        flush=True,
    )
