"""API keys from files or the environment; never from the command line, where every user of the
machine reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.cli.log import fail
from slipstream.server.kserve.access import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    Access,
    Restriction,
)


def read_access(
    api_key: Path | None,
    admin_key: Path | None,
    http: Mapping[str, Restriction] | None = None,
    grpc: Mapping[str, Restriction] | None = None,
) -> Access:
    """A file of API keys may hold several, a line each."""
    keys = _server_key(api_key, API_KEY_VARIABLE, "--api-key")
    admin = _server_key(admin_key, ADMIN_KEY_VARIABLE, "--admin-key")
    if len(admin.splitlines()) > 1:
        where = (
            ADMIN_KEY_VARIABLE if admin_key is None else f"--admin-key: the key file {admin_key}"
        )
        fail(f"{where} has several lines; there is one admin key")
    return Access(keys, admin, http_restrictions=http or {}, grpc_restrictions=grpc or {})


def read_api_key(file: Path | None) -> str:
    """A client's: the first of the file, or of the environment where there is none; empty where
    nobody gave one.
    """
    keys = (
        os.environ.get(API_KEY_VARIABLE, "").strip() if file is None else _read(file, "--api-key")
    )
    return keys.partition("\n")[0].strip()


def _server_key(file: Path | None, variable: str, option: str) -> str:
    if file is not None:
        return _read(file, option)
    key = os.environ.get(variable, "")
    if key and not key.strip():  # taken for no key, it would open the server to everybody
        fail(f"{variable} is set, but to blanks only")
    return key.strip()


def _read(file: Path, option: str) -> str:
    try:
        key = file.expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        other = (
            "it is not text"
            if isinstance(error, UnicodeDecodeError)
            else "there is no such home folder"
        )
        fail(f"{option}: the key file {file} cannot be read: {getattr(error, 'strerror', other)}")
    if not key:
        fail(f"{option}: the key file {file} is empty")
    return key
