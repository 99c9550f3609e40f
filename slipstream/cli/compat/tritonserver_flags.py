"""Every flag of tritonserver: its kind of value, its default, and whether it has an effect.

The table is declared as an argparse parser with tritonserver's rules: `--name=value` or
`--name value`, flags that can be repeated, and booleans that can stand alone.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from slipstream.cli.arguments import FRONTENDS_HELP, RANKS_HELP, REPLICAS_HELP, Parser
from slipstream.cli.keys import (
    ALLOWED_HOST_HELP,
    CERTIFICATE_HELP,
    CERTIFICATE_KEY_HELP,
    CORS_ORIGIN_HELP,
)

Kind = Literal["text", "integer", "number", "boolean"]
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
_VALUE_NAMES = {"text": "TEXT", "integer": "N", "number": "NUMBER", "boolean": "BOOL"}
ALIASES = {"model-store": "model-repository"}


class FlagError(Exception):
    """A mistake in the command line, in one line."""


@dataclass(frozen=True)
class Flag:
    kind: Kind
    default: Any
    help: str
    many: bool = False  # can be repeated
    honoured: bool = True  # otherwise the flag is accepted and has no effect


def _text(default: str, help: str) -> Flag:
    return Flag("text", default, help)


def _integer(default: int, help: str) -> Flag:
    return Flag("integer", default, help)


def _boolean(default: bool, help: str) -> Flag:
    return Flag("boolean", default, help)


def _texts(help: str) -> Flag:
    return Flag("text", [], f"{help}; can be repeated.", many=True)


def _ignored(kind: Kind = "text", many: bool = False) -> Flag:
    text = "Accepted for compatibility; no effect."
    return Flag(kind, [] if many else None, text, many, honoured=False)


_GENERAL = {
    "help": _boolean(False, "Print this help and exit."),
    "version": _boolean(False, "Print the version and exit."),
    "id": _text("triton", "Name of the server in its metadata."),
    "model-repository": _texts("Folder that holds the models"),
    "model-control-mode": _text(
        "none",
        "When models are loaded: none (all at the start), poll (when files change) or explicit "
        "(by requests).",
    ),
    "load-model": _texts("With explicit control: model to load at the start; * for all"),
    "repository-poll-secs": Flag(
        "number", 15.0, "With poll control: seconds between two checks of the repository."
    ),
    "strict-readiness": _boolean(True, "Report ready only if all models are ready."),
    "exit-on-error": _boolean(True, "Exit if a model fails to load at the start."),
    "exit-timeout-secs": Flag(
        "number", 30.0, "Seconds that running requests have to finish at exit."
    ),
    "disable-auto-complete-config": _boolean(False, "Require complete config.pbtxt files."),
    "strict-model-config": _boolean(False, "Older name of --disable-auto-complete-config."),
    "allow-python-models": _boolean(False, "Run the model.py files of the repository."),
    "frontends": _text("auto", f"{FRONTENDS_HELP}."),
    "replicas": Flag("integer", None, f"{REPLICAS_HELP}."),
    "ranks": Flag("integer", None, f"{RANKS_HELP}."),
    "cluster-key": _text(
        "", "File of the key that the ranks on several machines share, with mode 0600."
    ),
    "rank-wait-secs": Flag(
        "number", 300.0, "Seconds to wait for the ranks on other machines at the start."
    ),
}
_HTTP = {
    "allow-http": _boolean(True, "Serve HTTP."),
    "http-address": _text("0.0.0.0", "IP address that HTTP listens on."),
    "http-port": _integer(8000, "Port for HTTP."),
    "http-max-input-size": _integer(64 << 20, "Maximum size of a request's body in bytes."),
    "http-header-forward-pattern": _text(
        "", "Regular expression of HTTP headers to forward as request parameters."
    ),
    "http-restricted-api": _texts("Require a header for APIs over HTTP: <apis>:<key>=<value>"),
    "ssl-certfile": _text("", CERTIFICATE_HELP),
    "ssl-keyfile": _text("", CERTIFICATE_KEY_HELP),
    "cors-origin": _texts(CORS_ORIGIN_HELP),
    "allowed-host": _texts(ALLOWED_HOST_HELP),
}
_GRPC = {
    "allow-grpc": _boolean(True, "Serve gRPC."),
    "grpc-address": _text("0.0.0.0", "IP address that gRPC listens on."),
    "grpc-port": _integer(8001, "Port for gRPC."),
    "grpc-transport": _text(
        "core",
        "core: gRPC's C core, the fastest; aio: grpcio's public grpc.aio. "
        "An untested grpcio falls back to aio.",
    ),
    "grpc-header-forward-pattern": _text(
        "", "Regular expression of gRPC metadata to forward as request parameters."
    ),
    "grpc-restricted-protocol": _texts(
        "Require a metadata entry for APIs over gRPC: <apis>:<key>=<value>"
    ),
    "grpc-use-ssl": _boolean(False, "Serve gRPC over TLS."),
    "grpc-use-ssl-mutual": _boolean(False, "Serve gRPC over TLS and verify clients."),
    "grpc-server-cert": _text("", "PEM file of the server's certificate."),
    "grpc-server-key": _text("", "PEM file of the server's private key."),
    "grpc-root-cert": _text("", "PEM file of the root certificate of clients."),
    "grpc-infer-response-compression-level": _text(
        "none", "Compression of responses: none, low, medium or high."
    ),
    "grpc-keepalive-time": _integer(7_200_000, "Milliseconds between keepalive pings."),
    "grpc-keepalive-timeout": _integer(
        20_000, "Milliseconds to wait for the answer to a keepalive ping."
    ),
    "grpc-keepalive-permit-without-calls": _boolean(
        False, "Send keepalive pings without active calls, too."
    ),
    "grpc-http2-max-pings-without-data": _integer(2, "Maximum number of pings without data."),
    "grpc-http2-min-recv-ping-interval-without-data": _integer(
        300_000, "Minimum time in milliseconds between a client's pings without data."
    ),
    "grpc-http2-max-ping-strikes": _integer(
        2, "Bad pings after which the connection is closed; 0: never."
    ),
    "grpc-max-connection-age": _integer(
        0, "Maximum age of a connection in milliseconds; 0: no limit."
    ),
    "grpc-max-connection-age-grace": _integer(
        0, "Milliseconds that calls have to finish after the maximum age; 0: no limit."
    ),
}
_METRICS_AND_LOG = {
    "allow-metrics": _boolean(True, "Serve metrics."),
    "metrics-address": _text(
        "", "IP address that metrics listen on (default: the --http-address)."
    ),
    "metrics-port": _integer(8002, "Port for metrics."),
    "http-metrics": _boolean(False, "Serve /metrics on the HTTP port, too."),
    "metrics-config": _texts("Metrics setting: <setting>=<value>"),
    "log-verbose": _integer(0, "Level of verbose log lines; 0: none."),
    "log-info": _boolean(True, "Write INFO lines."),
    "log-warning": _boolean(True, "Write WARNING lines."),
    "log-error": _boolean(True, "Write ERROR lines."),
    "log-format": _text("default", "Format of log lines: default, ISO8601 or json."),
    "log-file": _text("", "File for the log (default: standard error)."),
    "trace-config": _texts("Trace setting: [<mode>,]<setting>=<value>"),
    "trace-file": Flag("text", None, "Older form of --trace-config triton,file=."),
    "trace-level": Flag("text", None, "Older form of --trace-config level=."),
    "trace-rate": Flag("text", None, "Older form of --trace-config rate=."),
    "trace-count": Flag("text", None, "Older form of --trace-config count=."),
    "trace-log-frequency": Flag(
        "text", None, "Older form of --trace-config triton,log-frequency=."
    ),
}
_ACCESS_AND_LIMITS = {
    "api-key": _text("", "File of the accepted API keys, one per line (default: no keys)."),
    "admin-key": _text("", "File of the key for loading models and changing settings."),
    "health-needs-key": _boolean(False, "Require the key for health probes, too."),
    "allow-client-shm": _boolean(False, "Allow clients to register shared memory."),
    "cache-config": _texts("Response cache setting: local,size=<bytes>"),
    "response-cache-byte-size": _integer(0, "Older form of --cache-config local,size=."),
    "rate-limit": _text("off", "Rate limiter of Python models: off or execution_count."),
    "rate-limit-resource": _texts("Resource of the rate limiter: <name>:<count>[:<device>]"),
    "allow-sagemaker": _boolean(False, "Not supported."),
    "allow-vertex-ai": _boolean(False, "Not supported."),
    "model-namespacing": _boolean(False, "Not supported."),
}
_IGNORED = {
    **dict.fromkeys(
        (
            "backend-directory",
            "repoagent-directory",
            "cache-directory",
            "pinned-memory-pool-byte-size",
            "min-supported-compute-capability",
            "buffer-manager-thread-count",
            "model-load-thread-count",
            "model-load-retry-count",
            "model-config-name",
            "http-thread-count",
            "grpc-infer-allocation-pool-size",
            "grpc-infer-thread-count",
            "grpc-max-response-pool-size",
            "metrics-interval-ms",
            "sagemaker-port",
            "sagemaker-safe-port-range",
            "sagemaker-thread-count",
            "vertex-ai-port",
            "vertex-ai-thread-count",
            "vertex-ai-default-model",
        ),
        _ignored(),
    ),
    **dict.fromkeys(
        (
            "reuse-http-port",
            "reuse-grpc-port",
            "enable-peer-access",
            "allow-gpu-metrics",
            "allow-cpu-metrics",
        ),
        _ignored("boolean"),
    ),
    **dict.fromkeys(
        (
            "backend-config",
            "cuda-memory-pool-byte-size",
            "cuda-virtual-address-size",
            "host-policy",
            "model-load-gpu-limit",
        ),
        _ignored(many=True),
    ),
}
GROUPS = {
    "server and models": _GENERAL,
    "HTTP": _HTTP,
    "gRPC": _GRPC,
    "metrics, log and traces": _METRICS_AND_LOG,
    "access and limits": _ACCESS_AND_LIMITS,
}
FLAGS: dict[str, Flag] = {
    **_GENERAL,
    **_HTTP,
    **_GRPC,
    **_METRICS_AND_LOG,
    **_ACCESS_AND_LIMITS,
    **_IGNORED,
}


@dataclass
class FlagValues:
    """The values of all flags of one command line."""

    values: dict[str, Any]
    ignored: list[str] = field(default_factory=list)  # given flags without an effect

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class FlagParser(Parser):
    """Reports mistakes with FlagError, in tritonserver's words."""

    def add_help_option(self) -> None:
        """Add nothing: --help is in the table."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)

    def describe_unknown(self, argument: str) -> str:
        if not argument.startswith("--"):
            return f"unexpected argument '{argument}'"
        written = argument[2:].partition("=")[0]
        close = difflib.get_close_matches(written.replace("_", "-"), [*FLAGS, *ALIASES], n=1)
        hint = (
            f"; did you mean --{close[0]}?" if close else " (tritonserver --help lists all flags)"
        )
        return f"unknown flag --{written}{hint}"


class _StoreFlag(argparse.Action):
    """Reads the value of a flag, and appends it if the flag can be repeated."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = namespace.flags
        flag = FLAGS[self.dest]
        value = _read(self.dest, flag.kind, _value_or_default(self.dest, flag, values))
        if flag.many:
            given.values[self.dest].append(value)
        else:
            given.values[self.dest] = value
        if not flag.honoured and self.dest not in given.ignored:
            given.ignored.append(self.dest)


def create_parser() -> FlagParser:
    """Return the parser of all flags. `parse_flags` calls it and returns the values."""
    parser = FlagParser(
        "tritonserver",
        "Serve model repositories with the flags of Triton Inference Server.",
        allow_abbrev=False,
    )
    for title, flags in GROUPS.items():
        _add_flags(parser.group(title), flags)
    _add_flags(parser.no_effect_group(), _IGNORED)
    return parser


def _add_flags(group: Any, flags: dict[str, Flag]) -> None:
    for name, flag in flags.items():
        aliases = [f"--{alias}" for alias, target in ALIASES.items() if target == name]
        if name == "help":
            aliases.append("-h")
        group.add_argument(
            f"--{name}",
            *aliases,
            action=_StoreFlag,
            dest=name,
            nargs="?",
            metavar=_VALUE_NAMES[flag.kind],
            help=_help_text(flag),
        )


def _help_text(flag: Flag) -> str:
    if "default" in flag.help or flag.default in (None, "", [], False):
        return flag.help
    default = f"{flag.default:g}" if flag.kind == "number" else str(flag.default).lower()
    return f"{flag.help.rstrip('.')} (default: {default})."


def parse_flags(arguments: Sequence[str]) -> FlagValues:
    """Return the values of all flags. Raises FlagError."""
    defaults = {
        name: list(flag.default) if flag.many else flag.default for name, flag in FLAGS.items()
    }
    given = FlagValues(defaults)
    parser = create_parser()
    parser.set_defaults(flags=given)
    parser.parse(arguments)
    return given


def _value_or_default(name: str, flag: Flag, value: str | None) -> str:
    """Return the value of a flag. A boolean and --log-verbose can stand alone."""
    if value is not None:
        return value
    if flag.kind == "boolean":
        return "true"
    if name == "log-verbose":
        return "1"
    raise FlagError(f"--{name} needs a value")


def _read(name: str, kind: Kind, value: str) -> Any:
    if kind == "boolean":
        if value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        raise FlagError(f"--{name} must be true or false, not '{value}'")
    if kind == "text":
        return value
    try:
        if name == "log-verbose" and value.lower() in ("true", "false"):
            return int(value.lower() == "true")
        number = int(value) if kind == "integer" else float(value)
    except ValueError as error:
        raise FlagError(f"--{name} must be a number, not '{value}'") from error
    if not 0 <= number < 2**63:
        raise FlagError(f"--{name} must be 0 or more, not {value}")
    return number
