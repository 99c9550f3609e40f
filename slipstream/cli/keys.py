"""API keys from files or the environment.

Keys are never given on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.cli.arguments import CommandError
from slipstream.server.engine_link.child import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from slipstream.server.kserve.access import Access, Restriction


def read_access(
    api_key: Path | None,
    admin_key: Path | None,
    http: Mapping[str, Restriction] | None = None,
    grpc: Mapping[str, Restriction] | None = None,
) -> Access:
    """Return the keys that a server accepts. A file may hold several API keys, one per line."""
    keys = _server_key(api_key, API_KEY_VARIABLE, "--api-key")
    admin = _server_key(admin_key, ADMIN_KEY_VARIABLE, "--admin-key")
    if len(admin.splitlines()) > 1:
        where = ADMIN_KEY_VARIABLE
        if admin_key is not None:
            where = f"--admin-key: the key file {admin_key}"
        raise CommandError(f"{where} has several lines; there is one admin key")
    return Access(keys, admin, http_restrictions=http or {}, grpc_restrictions=grpc or {})


def read_api_key(file: Path | None) -> str:
    """Return a client's key: the first of the file, else of SLIPSTREAM_API_KEY, else nothing."""
    keys = os.environ.get(API_KEY_VARIABLE, "")
    if file is not None:
        keys = _read(file, "--api-key")
    return keys.strip().partition("\n")[0].strip()


def _server_key(file: Path | None, variable: str, option: str) -> str:
    if file is not None:
        return _read(file, option)
    key = os.environ.get(variable, "")
    if key and not key.strip():  # an empty key would leave the server open
        raise CommandError(f"{variable} is set, but to blanks only")
    return key.strip()


def _read(file: Path, option: str) -> str:
    try:
        key = file.expanduser().read_text("utf-8").strip()
    except OSError as error:
        raise _unreadable(file, option, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise _unreadable(file, option, "it is not text") from error
    except RuntimeError as error:
        raise _unreadable(file, option, "there is no such home folder") from error
    if not key:
        raise CommandError(f"{option}: the key file {file} is empty")
    return key


def _unreadable(file: Path, option: str, reason: str) -> CommandError:
    return CommandError(f"{option}: the key file {file} cannot be read: {reason}")
