"""The messages between the primary front end and a secondary one, as plain data.

A message is the msgpack form of one dataclass behind its length and a byte for its kind. Both ends
decode into exactly these types and refuse anything else, so a message cannot cause code to run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slipstream.repository.models import EngineModel
from slipstream.server.kserve.access import Restriction
from slipstream.server.kserve.certificates import CertificateFiles
from slipstream.server.kserve.origins import OriginPolicy
from slipstream.server.log.output import LogSettings
from slipstream.server.metrics.increments import Increments
from slipstream.server.models.build import Recipe


@dataclass(frozen=True)
class FrontendOptions:
    """The server's options that a secondary front end needs."""

    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    http_restrictions: dict[str, Restriction] = field(default_factory=dict, repr=False)
    grpc_restrictions: dict[str, Restriction] = field(default_factory=dict, repr=False)
    health_needs_key: bool = False
    origin_policy: OriginPolicy = field(default_factory=OriginPolicy)
    http_certificate: CertificateFiles | None = None  # None: the HTTP port has no TLS
    server_name: str = "triton"
    http_max_input_bytes: int = 0
    embedding_pooling: str = ""
    http_forwarded_headers: str | None = None  # a regular expression
    grpc_forwarded_headers: str | None = None
    grpc_settings: dict[str, Any] = field(default_factory=dict)  # fields of GrpcOptions
    grpc_address: str = ""  # empty: the gRPC port is closed
    metrics_settings: dict[str, Any] = field(default_factory=dict)  # fields of MetricsConfig
    chat_template_folder: Path | None = None
    tool_call_parser: str = ""
    reasoning_parser: str = ""


@dataclass(frozen=True)
class StartOrder:
    """The argument of a secondary front end, as JSON on its command line."""

    index: int  # of this front end, from 1
    frontends: int  # number of all
    parent_process: int
    control: int  # descriptor of the socket for these messages
    upstream: int  # descriptor of the socket for connections to the primary front end
    counts: int  # descriptor of the memory with the requests in flight
    http: int  # descriptor of the HTTP port; -1: it is closed


@dataclass(frozen=True)
class LinkedEngineState:
    """One engine process, as a secondary front end sees it."""

    engine: int  # number of the engine, never used again; replicas have the same
    number: int  # of this replica, never used again
    slot: int  # of this replica in the table of requests in flight
    socket: str  # where the engine connects; empty: it does not serve
    failure: str  # why it does not serve, or why its process before this one failed
    draining: bool  # it was unloaded or replaced, and ends after its last request


@dataclass(frozen=True)
class EngineUse:
    """The engine model that a model uses."""

    model: EngineModel
    number: int  # of the engine; 0: it is not loaded, and only its tokenizer is used


@dataclass(frozen=True)
class ModelState:
    """One model that secondary front ends serve, too."""

    recipe: Recipe
    versions: tuple[int, ...]
    engines: dict[str, EngineUse]  # by name of the engine model
    load: int  # number of its load: each may find other files


# -- from the primary front end


@dataclass(frozen=True)
class Configure:
    """The first message."""

    options: FrontendOptions


@dataclass(frozen=True)
class Follow:
    """The state that a secondary front end must have when it responds with `Followed`."""

    number: int
    engines: list[LinkedEngineState]
    models: list[ModelState]
    listening: bool  # all models are loaded, and the ports may listen
    draining: bool
    tracing: bool  # some requests are traced: the primary front end answers all
    log: LogSettings


@dataclass(frozen=True)
class Collect:
    """Send all increments, then `Collected`."""

    number: int


@dataclass(frozen=True)
class StopRequests:
    """Stop the requests of a model with this id."""

    model: str
    request_id: str


@dataclass(frozen=True)
class Close:
    """Stop listening, finish the responses that are being sent, and exit."""

    seconds: float  # longest time for the responses


# -- from a secondary front end


@dataclass(frozen=True)
class Followed:
    number: int


@dataclass(frozen=True)
class Counted:
    increments: list[Increments]


@dataclass(frozen=True)
class Collected:
    number: int


@dataclass(frozen=True)
class Failed:
    """The last message: why the front end cannot continue."""

    reason: str


ToSecondary = Configure | Follow | Collect | StopRequests | Close
FromSecondary = Followed | Counted | Collected | Failed
Message = ToSecondary | FromSecondary

TO_SECONDARY: dict[bytes, type] = {
    b"O": Configure,
    b"F": Follow,
    b"C": Collect,
    b"S": StopRequests,
    b"Q": Close,
}
FROM_SECONDARY: dict[bytes, type] = {
    b"f": Followed,
    b"n": Counted,
    b"c": Collected,
    b"x": Failed,
}
_KIND_OF = {kind: key for key, kind in (TO_SECONDARY | FROM_SECONDARY).items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is no part of a message")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind} is no part of a message")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    key: msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)
    for key, kind in (TO_SECONDARY | FROM_SECONDARY).items()
}


class ControlError(Exception):
    """A frame that is not a message, or a message in the wrong direction."""


def encode(message: Message) -> tuple[bytes, bytes]:
    """Return the kind of a message and its content."""
    return _KIND_OF[type(message)], _ENCODER.encode(message)


def decode(kind: bytes, content: bytes, allowed: dict[bytes, type]) -> Any:
    if kind not in allowed:
        raise ControlError(f"unexpected kind of message: {kind!r}")
    try:
        return _DECODERS[kind].decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ControlError(f"damaged {allowed[kind].__name__}: {error}") from error


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    return None if text is None else re.compile(text)
