"""Every flag of tritonserver, as `--name=value` or `--name value`: its kind of value, and whether
it has an effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "integer", "number", "boolean"]
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
ALIASES = {"model-store": "model-repository"}


class FlagError(Exception):
    """One line for the user."""


@dataclass(frozen=True)
class Flag:
    kind: Kind = "text"
    default: Any = None
    many: bool = False
    honoured: bool = True  # otherwise it is taken, and one line says that it changes nothing here


def _ignored(kind: Kind = "text", many: bool = False) -> Flag:
    return Flag(kind, [] if many else None, many, honoured=False)


FLAGS: dict[str, Flag] = {
    "help": Flag("boolean", False),
    "version": Flag("boolean", False),
    "id": Flag("text", "triton"),
    "model-repository": Flag("text", [], many=True),
    "model-control-mode": Flag("text", "none"),
    "load-model": Flag("text", [], many=True),
    "repository-poll-secs": Flag("number", 15.0),
    "strict-readiness": Flag("boolean", True),
    "exit-on-error": Flag("boolean", True),
    "exit-timeout-secs": Flag("number", 30.0),
    "disable-auto-complete-config": Flag("boolean", False),
    "strict-model-config": Flag("boolean", False),  # what the one above was called before
    "allow-http": Flag("boolean", True),
    "http-address": Flag("text", "0.0.0.0"),
    "http-port": Flag("integer", 8000),
    "http-max-input-size": Flag("integer", 64 << 20),
    "http-header-forward-pattern": Flag("text", ""),
    "http-restricted-api": Flag("text", [], many=True),
    "allow-grpc": Flag("boolean", True),
    "grpc-address": Flag("text", "0.0.0.0"),
    "grpc-port": Flag("integer", 8001),
    "grpc-header-forward-pattern": Flag("text", ""),
    "grpc-restricted-protocol": Flag("text", [], many=True),
    "grpc-use-ssl": Flag("boolean", False),
    "grpc-use-ssl-mutual": Flag("boolean", False),
    "grpc-server-cert": Flag("text", ""),
    "grpc-server-key": Flag("text", ""),
    "grpc-root-cert": Flag("text", ""),
    "grpc-infer-response-compression-level": Flag("text", "none"),
    "grpc-keepalive-time": Flag("integer", 7_200_000),
    "grpc-keepalive-timeout": Flag("integer", 20_000),
    "grpc-keepalive-permit-without-calls": Flag("boolean", False),
    "grpc-http2-max-pings-without-data": Flag("integer", 2),
    "grpc-http2-min-recv-ping-interval-without-data": Flag("integer", 300_000),
    "grpc-http2-max-ping-strikes": Flag("integer", 2),
    "grpc-max-connection-age": Flag("integer", 0),
    "grpc-max-connection-age-grace": Flag("integer", 0),
    "allow-metrics": Flag("boolean", True),
    "metrics-address": Flag("text", ""),  # where HTTP is, unless told otherwise
    "metrics-port": Flag("integer", 8002),
    "log-verbose": Flag("integer", 0),
    "log-info": Flag("boolean", True),
    "log-warning": Flag("boolean", True),
    "log-error": Flag("boolean", True),
    "log-format": Flag("text", "default"),
    "log-file": Flag("text", ""),
    "allow-client-shm": Flag("boolean", False),
    "api-key": Flag("text", ""),
    "admin-key": Flag("text", ""),
    "allow-python-models": Flag("boolean", False),
    "allow-sagemaker": Flag("boolean", False),
    "allow-vertex-ai": Flag("boolean", False),
    "model-namespacing": Flag("boolean", False),
    "trace-config": Flag("text", [], many=True),
    **dict.fromkeys(
        ("trace-file", "trace-level", "trace-rate", "trace-count", "trace-log-frequency"), Flag()
    ),
    "cache-config": Flag("text", [], many=True),
    "response-cache-byte-size": Flag("integer", 0),
    "rate-limit": Flag("text", "off"),
    "rate-limit-resource": Flag("text", [], many=True),
    "metrics-config": Flag("text", [], many=True),
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


@dataclass
class Given:
    """The flags of one command line, with defaults for the others."""

    values: dict[str, Any]
    ignored: list[str] = field(default_factory=list)  # taken, without an effect

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def parse_flags(arguments: Sequence[str]) -> Given:
    given = Given(
        {name: list(flag.default) if flag.many else flag.default for name, flag in FLAGS.items()}
    )
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--"):
            raise FlagError(f"unexpected argument '{word}'")
        written, equals, value = word[2:].partition("=")
        name = ALIASES.get(written.replace("_", "-"), written.replace("_", "-"))
        if name not in FLAGS:
            raise FlagError(f"unknown flag --{written}{_suggestion(name)}")
        flag = FLAGS[name]
        if not equals:
            value = _next_value(name, flag, waiting)
        _store(given, name, flag, value)
    return given


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, [*FLAGS, *ALIASES], n=1)
    return f"; did you mean --{close[0]}?" if close else " (tritonserver --help lists all flags)"


def _next_value(name: str, flag: Flag, waiting: list[str]) -> str:
    """The value in the next word. A switch may stand alone."""
    if flag.kind == "boolean":
        return waiting.pop(0) if waiting and waiting[0].lower() in (*_TRUE, *_FALSE) else "true"
    if not waiting or waiting[0].startswith("--"):
        if name == "log-verbose":
            return "1"
        raise FlagError(f"--{name} needs a value")
    return waiting.pop(0)


def _store(given: Given, name: str, flag: Flag, value: str) -> None:
    read = _read(name, flag.kind, value)
    if flag.many:
        given.values[name].append(read)
    else:
        given.values[name] = read
    if not flag.honoured and name not in given.ignored:
        given.ignored.append(name)


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
