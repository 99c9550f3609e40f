"""`slipstream start`: serve a model repository or one model.

Without either, the default model is imported first.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.arguments import (
    FRONTENDS_HELP,
    CommandError,
    Parser,
    UsageError,
    add_verbose,
    at_least,
    frontend_count,
)
from slipstream.cli.engine_flags import (
    add_engine_flags,
    all_ranks,
    engine_overrides,
    explain_stages,
)
from slipstream.cli.interrupts import run_part
from slipstream.cli.keys import (
    ALLOWED_HOST_HELP,
    CERTIFICATE_HELP,
    CERTIFICATE_KEY_HELP,
    CORS_ORIGIN_HELP,
    origin,
    read_access,
    read_certificate,
)
from slipstream.cli.log import log
from slipstream.cli.models.repository_option import REPOSITORY_OPTIONS, repository_folder
from slipstream.cli.processes.free_ports import check_free
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY, remember_repository
from slipstream.server.engine_link.child import ENGINE_COMMAND, child_environment
from slipstream.server.engine_link.cluster.started import Started, find_start
from slipstream.server.log.capture import capture_output
from slipstream.server.log.output import configure_log
from slipstream.server.openai.tools.call_formats import CALL_FORMATS
from slipstream.weights.home import expand_home

if TYPE_CHECKING:
    from slipstream.cli.compat.tritonserver_settings import Tracing
    from slipstream.server.kserve.certificates import CertificateFiles
    from slipstream.server.options import Port, ServerOptions
    from slipstream.server.text.chat import ChatOptions

DEFAULT_MODEL = "smollm2-135m"
TOOL_CALL_PARSERS = tuple(dict.fromkeys(call_format.name for call_format in CALL_FORMATS))
REASONING_PARSERS = ("deepseek_r1", "qwen3", "mistral", "none")
_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
_OPENAI_PORT = 9000  # of Triton's OpenAI frontend


def create_parser() -> Parser:
    parser = Parser(
        "slipstream start",
        "Serve a model repository or one model. Without either, serve ~/models, and import a small "
        "model into it first if it is empty.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Serve only this model: a known name, a folder, a GGUF file, or ORG/NAME on the hub.",
    )
    parser.add_argument(
        *REPOSITORY_OPTIONS,
        type=Path,
        metavar="FOLDER",
        help=f"Folder that holds the models (default: {DEFAULT_REPOSITORY}).",
    )
    _add_ports(parser)
    _add_chat(parser)
    _add_keys(parser)
    add_engine_flags(parser)
    _add_log(parser)
    ignored = parser.group("other options")
    ignored.add_argument(
        "--mode",
        default="local",
        choices=["local", "docker"],
        help="Only local is supported; docker is refused.",
    )
    ignored.add_argument("--image", help="Accepted for compatibility; no effect without docker.")
    add_verbose(ignored)
    return parser


def _add_ports(parser: Parser) -> None:
    group = parser.group("network")
    group.add_argument(
        "--address",
        default="127.0.0.1",
        help="IP address to listen on; 0.0.0.0: all interfaces.",
    )
    group.add_argument(
        "--frontend",
        default="kserve",
        choices=["kserve", "openai"],
        help="openai: listen at port 9000 for HTTP only, with /metrics on it, as Triton's OpenAI "
        "frontend. OpenAI's routes are served with either.",
    )
    for name, service in (("http", "HTTP"), ("grpc", "gRPC"), ("metrics", "metrics")):
        openai = f"{_OPENAI_PORT} with" if name == "http" else "none with"
        group.add_argument(
            f"--{name}-port",
            type=int,
            metavar="PORT",
            help=f"Port for {service}; 0: any free port (default: {_PORTS[name]}, or {openai} "
            "--frontend openai).",
        )
    group.add_argument(
        "--http-metrics",
        action="store_true",
        help="Serve /metrics on the HTTP port, too.",
    )
    group.add_argument(
        "--grpc-transport",
        choices=["core", "aio"],
        default="core",
        help="core: gRPC's C core, the fastest; aio: grpcio's public grpc.aio. "
        "An untested grpcio falls back to aio.",
    )
    group.add_argument(
        "--frontends",
        type=frontend_count,
        default="auto",
        metavar="N",
        help=f"{FRONTENDS_HELP}.",
    )
    group.add_argument(
        "--exit-timeout-secs",
        type=at_least(0),
        default=30.0,
        metavar="SECONDS",
        help="At exit, wait this long for running requests to finish.",
    )


def _add_chat(parser: Parser) -> None:
    group = parser.group("chat")
    group.add_argument(
        "--openai-chat-template-tokenizer",
        metavar="FOLDER",
        help="Folder or hub id of the tokenizer whose chat template all models use (default: each "
        "model's own).",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help="Format of tool calls, by vLLM's names (default: as the chat template shows).",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="Format of reasoning, by vLLM's names; none: reasoning is part of the text (default: "
        "as the chat template shows).",
    )


def _add_keys(parser: Parser) -> None:
    group = parser.group("access")
    group.add_argument(
        "--api-key",
        type=Path,
        metavar="FILE",
        help="Require an API key; FILE holds the accepted keys, one per line.",
    )
    group.add_argument(
        "--admin-key",
        type=Path,
        metavar="FILE",
        help="Require this key, the content of FILE, for loading models and changing settings.",
    )
    group.add_argument(
        "--health-needs-key",
        action="store_true",
        help="Require the key for health probes, too (default: they need none).",
    )
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help=CERTIFICATE_HELP)
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help=CERTIFICATE_KEY_HELP)
    group.add_argument(
        "--cors-origin",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help=f"{CORS_ORIGIN_HELP}; can be repeated (default: only the server's own pages).",
    )
    group.add_argument(
        "--allowed-host",
        type=str.lower,
        action="append",
        default=[],
        metavar="NAME",
        help=f"{ALLOWED_HOST_HELP}; can be repeated.",
    )
    group.add_argument(
        "--allow-python-models",
        action="store_true",
        help="Run the model.py files of the repository.",
    )


def _add_log(parser: Parser) -> None:
    group = parser.group("log and traces")
    group.add_argument(
        "--log-format",
        default="default",
        choices=["default", "ISO8601", "json"],
        help="Format of log lines.",
    )
    group.add_argument(
        "--trace-config",
        action="append",
        default=[],
        metavar="[MODE,]NAME=VALUE",
        help="Trace setting, as for tritonserver; can be repeated.",
    )


def run(given: Namespace) -> int:
    """Serve, or start ranks for the server if a launcher started this as another of its
    processes.
    """
    try:
        flags = (all_ranks(given), given.replicas, given.cluster_key, given.rank_wait_secs)
        started = find_start(*flags)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if started.serves:
        return serve(given, started=started)
    configure_log(format=given.log_format)
    port = _port(given, "http")
    try:
        return started.run_without_server(port.address, port.number)
    except OSError as error:
        raise CommandError(f"--http-port {port.number}: {error.strerror}") from error


def serve(
    given: Namespace,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    started: Started = Started(),
) -> int:
    """Serve until a signal, with engines that this command starts. Returns the exit code."""
    configure_log(format=given.log_format)
    with capture_output():
        options = _server_options(given)
        settings = {**started.wanted_ranks(all_ranks(given)), **options.engine_settings}
        started.warn_of_unused(all_ranks(given))
        return _serve(
            replace(
                options,
                engine_command=engine_command,
                engine_settings=settings,
                cluster=started.cluster,
            )
        )


def _server_options(given: Namespace) -> ServerOptions:
    from slipstream.server.engine_link.client import Supervision
    from slipstream.server.options import ServerOptions

    if given.mode == "docker":
        raise CommandError("--mode docker: there is no container to start; leave it out")
    tracing = _tracing(given.trace_config)
    access = read_access(  # fails before a model is built
        given.api_key, given.admin_key, health_needs_key=given.health_needs_key
    )
    certificate = read_certificate(given.ssl_certfile, given.ssl_keyfile)
    overrides = engine_overrides(given)
    if explanation := explain_stages(given):
        log("INFO", explanation)
    for name in _PORTS:  # before a model is fetched
        port = _port(given, name)
        if port.open and port.number:
            check_free(port.address, port.number, f"--{name}-port")
    began = time.monotonic()
    repository = _repository(given.model, given.repo, given.weight_only)
    return ServerOptions(
        repositories=(repository,),
        prepare_seconds=time.monotonic() - began,
        http=_port(given, "http"),
        grpc=_port(given, "grpc"),
        grpc_settings=_grpc_settings(given, certificate),
        metrics=_port(given, "metrics"),
        http_metrics=given.http_metrics or given.frontend == "openai",
        embedding_pooling=given.embeddings or "",
        frontends=_frontends(given),
        exit_timeout_seconds=given.exit_timeout_secs,
        access=access,
        allowed_hosts=tuple(given.allowed_host),
        cors_origins=tuple(given.cors_origin),
        http_certificate=certificate,
        allow_python_models=given.allow_python_models,
        engine_settings=overrides,
        chat=_chat_options(given),
        trace_settings=tracing.settings,
        trace_export=tracing.export,
        supervision=Supervision(
            silence_seconds=given.watchdog_secs,
            start_seconds=given.server_timeout,
            idle_seconds=given.idle_unload or 0.0,
        ),
    )


def _grpc_settings(given: Namespace, certificate: CertificateFiles | None) -> dict[str, Any]:
    """Return fields of GrpcOptions. A certificate is that of both protocols."""
    settings = {"transport": given.grpc_transport}
    if certificate is None:
        return settings
    return {
        **settings,
        "server_certificate": certificate.certificate,
        "server_key": certificate.key,
    }


def _frontends(given: Namespace) -> int:
    """Return the number of server processes. Only one can load an engine for a request."""
    number: int = given.frontends
    if given.idle_unload is None:
        return number
    if number > 1:
        raise UsageError(f"--idle-unload needs a single server process: leave --frontends {number}")
    return 1


def _port(given: Namespace, name: str) -> Port:
    """Return a port. With --frontend openai only HTTP listens unless another port is given."""
    from slipstream.server.options import Port

    number: int | None = getattr(given, f"{name}_port")
    if number is not None:
        return Port(number, given.address)
    if given.frontend == "kserve":
        return Port(_PORTS[name], given.address)
    return Port(_OPENAI_PORT, given.address, open=name == "http")


def _chat_options(given: Namespace) -> ChatOptions:
    from slipstream.server.text.chat import ChatOptions

    return ChatOptions(
        _chat_template_folder(given.openai_chat_template_tokenizer),
        given.tool_call_parser or "",
        given.reasoning_parser or "",
    )


def _chat_template_folder(tokenizer: str | None) -> Path | None:
    """Return the folder of the tokenizer whose chat templates all models use."""
    if tokenizer is None:
        return None
    from slipstream.server.text.folder import read_tokenizer_folder
    from slipstream.weights.sources.hub import fetch_tokenizer

    option = "--openai-chat-template-tokenizer"
    folder = expand_home(tokenizer, option)
    if not folder.is_dir():
        folder = fetch_tokenizer(tokenizer)
    if "default" not in read_tokenizer_folder(folder).chat_templates:
        raise CommandError(f"{option} {tokenizer}: the tokenizer has no chat template")
    return folder


def _serve(options: ServerOptions) -> int:
    from slipstream.server.lifecycle import StartFailed, run_server

    try:
        return run_server(options)
    except StartFailed as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:
        raise  # the reader of the log is gone
    except (ValueError, OSError) as error:
        # not a mistake of the user, so the traceback must be seen
        raise RuntimeError("the server failed") from error


def _tracing(texts: list[str]) -> Tracing:
    from slipstream.cli.compat.tritonserver_flags import FlagError, parse_flags
    from slipstream.cli.compat.tritonserver_settings import trace_settings

    try:
        return trace_settings(parse_flags([f"--trace-config={text}" for text in texts]))
    except FlagError as error:
        raise CommandError(str(error)) from error


def _repository(model: str | None, repository: Path | None, weight_only: str | None) -> Path:
    if model is None:
        if weight_only is not None:
            raise UsageError(
                f"--weight-only {weight_only} needs a MODEL to build: the engines of a repository "
                f"are already built; use: slipstream import --weight-only {weight_only}"
            )
        if repository is None:
            return _default_repository()
        remember_repository(repository_folder(repository))
        return repository_folder(repository)
    if repository is not None:
        raise CommandError(
            f"give either a model to serve ({model}) or a repository (--repo {repository}), not "
            "both; to put a model into a repository, use: slipstream import"
        )
    from slipstream.cli.models.served_model import prepare_repository

    return prepare_repository(model, weight_only)


def _default_repository() -> Path:
    """Return ~/models. If it holds no model, import the default model first."""
    repository = repository_folder(DEFAULT_REPOSITORY)
    if any(repository.glob("*/config.pbtxt")):
        return repository
    print(
        f"No model repository at {repository}: importing {DEFAULT_MODEL}, the default model.",
        flush=True,
    )
    # A separate process: building an engine needs torch, which the server never loads.
    command = [sys.executable, "-P", "-m", "slipstream.cli.models.import_model", DEFAULT_MODEL]
    code = run_part([*command, str(repository)], child_environment())
    if code != 0:
        raise CommandError(
            f"{DEFAULT_MODEL} could not be imported, for the reason above; "
            "import another model with: slipstream import -m NAME --source PATH"
        )
    return repository
