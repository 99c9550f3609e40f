"""`slipstream start`: serve a model repository, or a model; with neither, bring in the default
model first.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.keys import read_access
from slipstream.cli.list_models import DEFAULT_REPOSITORY, repository_folder
from slipstream.cli.log import VerboseOption, fail, log
from slipstream.server.engine_link.child import child_environment
from slipstream.server.log.capture import capture_output
from slipstream.server.log.output import configure_log

if TYPE_CHECKING:
    from slipstream.cli.compat.tritonserver_settings import Tracing
    from slipstream.server.options import ServerOptions

DEFAULT_MODEL = "smollm2-135m"


class DataType(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class LogFormat(StrEnum):
    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


class Mode(StrEnum):
    LOCAL = "local"
    DOCKER = "docker"


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model to serve alone, in place of --repo: a known name, a folder, a GGUF "
        "file, or org/name at the hub.",
    ),
]
RepositoryOption = Annotated[
    Path | None,
    typer.Option(
        "--repo",
        "--model-repository",
        "--model-store",
        help="The folder that holds the models; default ~/models, with a small model if it is empty.",
    ),
]
TraceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-config",
        metavar="[MODE,]NAME=VALUE",
        help="Traces, as tritonserver takes it; repeatable.",
    ),
]


def start(
    model: ModelArgument = None,
    repo: RepositoryOption = None,
    address: Annotated[
        str, typer.Option("--address", help="Where to listen; 0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", help="HTTP; 0: any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="gRPC; 0: any free port.")] = 8001,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", help="Metrics; 0: any free port.")
    ] = 8002,
    exit_timeout: Annotated[
        float,
        typer.Option(
            "--exit-timeout-secs", min=0, metavar="SECONDS", help="For requests to finish at exit."
        ),
    ] = 30.0,
    server_timeout: Annotated[
        float,
        typer.Option("--server-timeout", min=1, metavar="SECONDS", help="For an engine to load."),
    ] = 300.0,
    watchdog: Annotated[
        float,
        typer.Option(
            "--watchdog-secs",
            min=1,
            metavar="SECONDS",
            help="Of silence, before an engine is replaced.",
        ),
    ] = 60.0,
    api_key: Annotated[
        Path | None, typer.Option("--api-key", help="A file with the keys of clients, a line each.")
    ] = None,
    admin_key: Annotated[
        Path | None, typer.Option("--admin-key", help="A file with the key of those who control.")
    ] = None,
    allow_python_models: Annotated[
        bool,
        typer.Option("--allow-python-models", help="Run the model.py files of the repository."),
    ] = False,
    dtype: Annotated[
        DataType, typer.Option("--dtype", help="What the engine computes in.")
    ] = DataType.AUTO,
    device: Annotated[Device, typer.Option("--device", help="What it computes on.")] = Device.AUTO,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="How log lines are written.")
    ] = LogFormat.DEFAULT,
    trace_config: TraceOption = None,
    mode: Annotated[
        Mode, typer.Option("--mode", help="local; there is no container to start.")
    ] = Mode.LOCAL,
    verbose: VerboseOption = False,
) -> None:
    configure_log(format=log_format.value)
    with capture_output():
        if mode is Mode.DOCKER:
            fail("--mode docker: there is no container to start; leave it out")
        tracing = _tracing(trace_config or [])
        access = read_access(api_key, admin_key)  # before a model is built, which may take long
        repository = _repository(model, repo)
        from slipstream.server.engine_link.client import Supervision
        from slipstream.server.options import Port, ServerOptions

        options = ServerOptions(
            repositories=(repository,),
            http=Port(http_port, address),
            grpc=Port(grpc_port, address),
            metrics=Port(metrics_port, address),
            exit_timeout_seconds=exit_timeout,
            access=access,
            allow_python_models=allow_python_models,
            engine_settings=_overrides(dtype, device),
            trace_settings=tracing.settings,
            trace_export=tracing.export,
            supervision=Supervision(silence_seconds=watchdog, start_seconds=server_timeout),
        )
        raise typer.Exit(_serve(options))


def _serve(options: ServerOptions) -> int:
    from slipstream.server.lifecycle import StartFailed, run_server

    try:
        return run_server(options)
    except StartFailed as error:
        log("ERROR", str(error))
        return 1


def _tracing(texts: list[str]) -> Tracing:
    from slipstream.cli.compat.tritonserver_flags import FlagError, parse_flags
    from slipstream.cli.compat.tritonserver_settings import trace_settings

    try:
        return trace_settings(parse_flags([f"--trace-config={text}" for text in texts]))
    except FlagError as error:
        fail(str(error))


def _repository(model: str | None, repo: Path | None) -> Path:
    if model is None and repo is not None:
        return repository_folder(repo)
    if model is None:
        return _default_repository()
    if repo is not None:
        fail(
            f"give either a model to serve ({model}) or a repository (--repo {repo}), not both; to put a model into "
            "a repository, use: slipstream import"
        )
    from slipstream.cli.served_model import repository_of

    return repository_of(model)


def _overrides(dtype: DataType, device: Device) -> dict[str, str]:
    given = {"dtype": dtype.value, "device": device.value}
    return {name: value for name, value in given.items() if value != "auto"}


def _default_repository() -> Path:
    """~/models; when there is nothing in it, the default model is brought in."""
    repository = repository_folder(DEFAULT_REPOSITORY)
    if not any(repository.glob("*/config.pbtxt")):
        typer.echo(
            f"No model repository at {repository}: importing {DEFAULT_MODEL}, the default model."
        )
        # In a process of its own: building an engine needs torch, which the server never loads.
        command = [sys.executable, "-P", "-m", "slipstream.cli.main", "import", "-m", DEFAULT_MODEL]
        code = subprocess.call([*command, "--repo", str(repository)], env=child_environment())
        if code != 0:
            remedy = "import another model with: slipstream import -m NAME --source PATH"
            log("ERROR", f"{DEFAULT_MODEL} could not be imported, for the reason above; {remedy}")
            raise typer.Exit(code)
    return repository
