"""`tritonserver`: the server program with Triton's flags, log lines and exit codes."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.cli.arguments import CommandError, frontend_count
from slipstream.cli.compat.tritonserver_flags import (
    FlagError,
    FlagValues,
    create_parser,
    parse_flags,
)
from slipstream.cli.compat.tritonserver_settings import (
    metrics_settings,
    rate_limits,
    response_cache_bytes,
    trace_settings,
)
from slipstream.cli.keys import origin, read_access, read_certificate
from slipstream.cli.log import log
from slipstream.server.engine_link.cluster.started import Started, find_start
from slipstream.server.log.capture import capture_output
from slipstream.server.log.formats import FORMATS
from slipstream.server.log.output import HANDLER, configure_log
from slipstream.version import VERSION
from slipstream.weights.home import expand_home

logger = logging.getLogger("slipstream.cli.compat.tritonserver")

PROCESS_NAME = b"tritonserver"
_PR_SET_NAME = 15
MODES = ("none", "poll", "explicit")
_API_FLAGS = {
    "allow-sagemaker": "SageMaker",
    "allow-vertex-ai": "Vertex AI",
    "model-namespacing": "model namespaces",
}
# flag: the field of GrpcOptions that it sets
_GRPC_SETTINGS = {
    "grpc-transport": "transport",
    "grpc-infer-response-compression-level": "response_compression",
    "grpc-keepalive-time": "keepalive_time_ms",
    "grpc-keepalive-timeout": "keepalive_timeout_ms",
    "grpc-keepalive-permit-without-calls": "keepalive_permit_without_calls",
    "grpc-http2-max-pings-without-data": "http2_max_pings_without_data",
    "grpc-http2-min-recv-ping-interval-without-data": (
        "http2_min_recv_ping_interval_without_data_ms"
    ),
    "grpc-http2-max-ping-strikes": "http2_max_ping_strikes",
    "grpc-max-connection-age": "max_connection_age_ms",
    "grpc-max-connection-age-grace": "max_connection_age_grace_ms",
}
_TRANSPORTS = ("core", "aio")
_COMPRESSION = {"none": "none", "low": "deflate", "medium": "gzip", "high": "gzip"}


def main() -> None:
    name_process()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the server and return the exit code. A mistake in a flag is one line of the log."""
    try:
        return _run(parse_flags(arguments))
    except FlagError as error:
        HANDLER.write_console(logging.ERROR, f"tritonserver: error: {error}")
    except CommandError as error:
        log("ERROR", str(error))
    return 1


def _run(given: FlagValues) -> int:
    if given["help"]:
        print(create_parser().format_help())
        return 0
    if given["version"]:
        print(f"tritonserver (slipstream {VERSION})")
        return 0
    if given["log-format"] not in FORMATS:
        known = ", ".join(FORMATS)
        raise FlagError(f"--log-format must be one of {known}, not '{given['log-format']}'")
    configure_log(format=given["log-format"])
    _check(given)
    flags = (given["ranks"], given["replicas"], given["cluster-key"], given["rank-wait-secs"])
    try:
        started = find_start(*flags)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not started.serves:
        return _run_without_server(given, started)
    with capture_output():
        return _serve(given, started)


def _run_without_server(given: FlagValues, started: Started) -> int:
    port = given["http-port"] if given["allow-http"] else None
    try:
        return started.run_without_server(given["http-address"], port)
    except OSError as error:
        raise CommandError(f"--http-port {port}: {error.strerror}") from error


def name_process() -> None:
    """Set the name of the process, for `pgrep tritonserver` and `pkill tritonserver`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME, 0, 0, 0)


def _check(given: FlagValues) -> None:
    if not given["model-repository"]:
        raise FlagError("--model-repository is missing: it names the folder that holds the models")
    if given["model-control-mode"] not in MODES:
        mode = given["model-control-mode"]
        raise FlagError(f"--model-control-mode must be one of {', '.join(MODES)}, not '{mode}'")
    if given["load-model"] and given["model-control-mode"] != "explicit":
        raise FlagError("--load-model can only be given with --model-control-mode=explicit")
    for flag, what in _API_FLAGS.items():
        if given[flag]:
            raise FlagError(f"--{flag} is not supported: this server has no {what}")


def _serve(given: FlagValues, started: Started) -> int:
    from slipstream.server.lifecycle import ModelsFailed, StartFailed, run_server

    options = server_options(given, started)
    try:
        configure_log(
            file=given["log-file"],
            info=given["log-info"],
            warning=given["log-warning"],
            error=given["log-error"],
            verbose_level=given["log-verbose"],
        )
    except OSError as error:
        raise FlagError(
            f"--log-file: cannot write {given['log-file']}: {error.strerror}"
        ) from error
    if given.ignored:
        names = ", ".join(f"--{name}" for name in given.ignored)
        logger.info("accepted for compatibility, without effect: %s", names)
    started.warn_of_unused(given["ranks"])
    try:
        return run_server(options)
    except ModelsFailed as error:
        logger.error(str(error))
        HANDLER.write_console(
            logging.ERROR, "error: creating server: Internal - failed to load all models"
        )
    except StartFailed as error:
        HANDLER.write_console(logging.ERROR, f"error: creating server: {error}")
    return 1


def server_options(given: FlagValues, started: Started = Started()) -> Any:
    from slipstream.server.options import Port, ServerOptions

    tracing = trace_settings(given)
    return ServerOptions(
        repositories=_repositories(given),
        http=Port(given["http-port"], given["http-address"], given["allow-http"]),
        grpc=Port(given["grpc-port"], given["grpc-address"], given["allow-grpc"]),
        metrics=Port(
            given["metrics-port"],
            given["metrics-address"] or given["http-address"],
            given["allow-metrics"],
        ),
        http_metrics=given["http-metrics"],
        control_mode=given["model-control-mode"],
        load_models=tuple(given["load-model"]),
        poll_seconds=max(1.0, given["repository-poll-secs"]),
        frontends=_frontends(given["frontends"]),
        engine_settings=_engine_settings(given["replicas"], given["ranks"], started),
        cluster=started.cluster,
        strict_readiness=given["strict-readiness"],
        exit_on_error=given["exit-on-error"],
        exit_timeout_seconds=given["exit-timeout-secs"],
        server_name=given["id"],
        allow_python_models=given["allow-python-models"],
        complete_config=not (given["disable-auto-complete-config"] or given["strict-model-config"]),
        allow_client_shared_memory=given["allow-client-shm"],
        access=_access(given),
        allowed_hosts=tuple(name.lower() for name in given["allowed-host"]),
        cors_origins=_origins(given["cors-origin"]),
        http_certificate=read_certificate(
            _file(given["ssl-certfile"]), _file(given["ssl-keyfile"])
        ),
        http_max_input_bytes=given["http-max-input-size"],
        http_forwarded_headers=_pattern(given, "http-header-forward-pattern"),
        grpc_forwarded_headers=_pattern(given, "grpc-header-forward-pattern"),
        grpc_settings=_grpc_settings(given),
        trace_settings=tracing.settings,
        trace_export=tracing.export,
        response_cache_bytes=response_cache_bytes(given),
        rate_limits=rate_limits(given),
        metrics_settings=metrics_settings(given),
        announce=False,
    )


def _frontends(text: str) -> int:
    try:
        return frontend_count(text)
    except ArgumentTypeError as error:
        raise FlagError(f"--frontends {error}") from error


def _engine_settings(replicas: int | None, ranks: int | None, started: Started) -> dict[str, Any]:
    settings = started.wanted_ranks(ranks)
    for name, value in (("replicas", replicas), ("ranks", ranks)):
        if value is not None:
            if value < 1:
                raise FlagError(f"--{name} must be at least 1, not {value}")
            settings[name] = value
    return settings


def _repositories(given: FlagValues) -> tuple[Path, ...]:
    try:
        return tuple(expand_home(path, "--model-repository") for path in given["model-repository"])
    except ValueError as error:
        raise FlagError(str(error)) from error


def _access(given: FlagValues) -> Any:
    return read_access(
        _file(given["api-key"]),
        _file(given["admin-key"]),
        _restrictions(given, "http-restricted-api"),
        _restrictions(given, "grpc-restricted-protocol"),
        given["health-needs-key"],
    )


def _origins(texts: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(map(origin, texts))
    except ArgumentTypeError as error:
        raise FlagError(f"--cors-origin: {error}") from error


def _file(value: str) -> Path | None:
    return Path(value) if value else None


def _restrictions(given: FlagValues, flag: str) -> Any:
    from slipstream.server.kserve.access import parse_restrictions

    try:
        return parse_restrictions(given[flag])
    except ValueError as error:
        raise FlagError(f"--{flag}: {error}") from error


def _pattern(given: FlagValues, flag: str) -> re.Pattern[str] | None:
    try:
        return re.compile(given[flag]) if given[flag] else None
    except re.error as error:
        raise FlagError(f"--{flag}: '{given[flag]}' is no regular expression: {error}") from error


def _grpc_settings(given: FlagValues) -> dict[str, Any]:
    settings = {field: given[flag] for flag, field in _GRPC_SETTINGS.items()}
    level = given["grpc-infer-response-compression-level"]
    if level not in _COMPRESSION:
        text = f"must be one of {', '.join(_COMPRESSION)}, not '{level}'"
        raise FlagError(f"--grpc-infer-response-compression-level {text}")
    settings["response_compression"] = _COMPRESSION[level]
    if given["grpc-transport"] not in _TRANSPORTS:
        text = f"must be one of {', '.join(_TRANSPORTS)}, not '{given['grpc-transport']}'"
        raise FlagError(f"--grpc-transport {text}")
    if given["grpc-use-ssl"] or given["grpc-use-ssl-mutual"]:
        for flag in ("grpc-server-cert", "grpc-server-key"):
            if not given[flag]:
                raise FlagError(f"--grpc-use-ssl needs --{flag}")
        settings["server_certificate"] = Path(given["grpc-server-cert"])
        settings["server_key"] = Path(given["grpc-server-key"])
        if given["grpc-use-ssl-mutual"]:
            if not given["grpc-root-cert"]:
                raise FlagError("--grpc-use-ssl-mutual needs --grpc-root-cert")
            settings["root_certificate"] = Path(given["grpc-root-cert"])
    return settings


if __name__ == "__main__":
    main()
