"""The cluster key, a text that all ranks of a cluster share, and the CURVE keys made from it.

CURVE encrypts and authenticates the connections between rank 0 and the other machines. Both ends
derive their keys from the cluster key, so a process without it can neither connect nor listen.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth.thread
from zmq.utils import z85

CLUSTER_KEY_VARIABLE = "SLIPSTREAM_CLUSTER_KEY"
CLUSTER_KEY_FILE_VARIABLE = "SLIPSTREAM_CLUSTER_KEY_FILE"
_LEAST_LENGTH = 16  # characters
_HOW_TO_MAKE = "such as the output of: openssl rand -hex 32"
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}  # about 50 ms, to slow down attacks


class ClusterKeyError(ValueError):
    """The cluster key is missing or cannot be used. The text says what to do."""


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


@dataclass(frozen=True)
class ClusterKey:
    """A cluster key, with the CURVE keys of both ends of a connection."""

    text: str = field(repr=False)
    listening: KeyPair = field(repr=False)
    connecting: KeyPair = field(repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that give the key to a process of this machine, wherever it came from."""
        return {CLUSTER_KEY_VARIABLE: self.text, CLUSTER_KEY_FILE_VARIABLE: ""}

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket that listens, before it is bound. `Gate` checks who connects."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self.listening.public)
        socket.set(zmq.CURVE_SECRETKEY, self.listening.secret)

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket before it is connected."""
        socket.set(zmq.CURVE_SERVERKEY, self.listening.public)
        socket.set(zmq.CURVE_PUBLICKEY, self.connecting.public)
        socket.set(zmq.CURVE_SECRETKEY, self.connecting.secret)


class Gate:
    """Refuses connections of other keys to the listening sockets of a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> None:
        self._public = key.connecting.public
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, public_key: bytes) -> bool:
        """Return whether a connection has the key. The library calls it."""
        return public_key == self._public

    def close(self) -> None:
        self._authenticator.stop()


def derive_keys(text: str) -> ClusterKey:
    return ClusterKey(text, _key_pair(text, b"listening"), _key_pair(text, b"connecting"))


def _key_pair(text: str, purpose: bytes) -> KeyPair:
    secret = hashlib.scrypt(text.encode(), salt=b"slipstream " + purpose, **_SCRYPT)
    encoded = z85.encode(secret)
    return KeyPair(zmq.curve_public(encoded), encoded)


def read_cluster_key(file: str = "", environment: Mapping[str, str] = os.environ) -> ClusterKey:
    """Return the key of --cluster-key, else of the variables. Raises ClusterKeyError."""
    if file:
        return derive_keys(_read(Path(file), "--cluster-key"))
    if named := environment.get(CLUSTER_KEY_FILE_VARIABLE, ""):
        return derive_keys(_read(Path(named), CLUSTER_KEY_FILE_VARIABLE))
    text = environment.get(CLUSTER_KEY_VARIABLE, "").strip()
    if not text:
        raise ClusterKeyError(
            "ranks on several machines need a cluster key: give all of them the same "
            f"{CLUSTER_KEY_VARIABLE}, {_HOW_TO_MAKE}; or the same file with --cluster-key or "
            f"{CLUSTER_KEY_FILE_VARIABLE}"
        )
    return derive_keys(_checked(text, CLUSTER_KEY_VARIABLE))


def take_cluster_key() -> ClusterKey:
    """Return the key of the environment, and remove it from there: processes of the server get it
    so, and code of a model must not see it.
    """
    key = read_cluster_key()
    os.environ.pop(CLUSTER_KEY_VARIABLE, None)
    return key


def _read(path: Path, source: str) -> str:
    """Return the key in a file that only its owner can read."""
    try:
        status = path.expanduser().stat()
        text = path.expanduser().read_text("utf-8").strip()
    except OSError as error:
        raise ClusterKeyError(
            f"{source}: the key file {path} cannot be read: {error.strerror}"
        ) from error
    except (UnicodeDecodeError, RuntimeError) as error:
        raise ClusterKeyError(f"{source}: the key file {path} cannot be read: {error}") from error
    if problem := mode_problem(status):
        raise ClusterKeyError(f"{source}: the key file {path} {problem}")
    return _checked(text, f"{source}: the key file {path}")


def mode_problem(status: os.stat_result) -> str:
    """Return why a key file is not private; empty: it is.

    A group may read a file of root, as secrets of Kubernetes are mounted.
    """
    mode = stat.S_IMODE(status.st_mode)
    allowed = 0o740 if status.st_uid == 0 and os.geteuid() != 0 else 0o700
    if mode & ~allowed & 0o777:
        return f"has the mode {mode:04o}, so that others can read it: chmod 600 it"
    return ""


def _checked(text: str, source: str) -> str:
    if len(text) < _LEAST_LENGTH:
        raise ClusterKeyError(
            f"{source}: the cluster key has {len(text)} characters, it must have at least "
            f"{_LEAST_LENGTH}, {_HOW_TO_MAKE}"
        )
    return text
