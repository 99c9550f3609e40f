"""API keys from files or the environment; never from the command line, where every user of the machine reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from slipstream.cli.log import log
from slipstream.server.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, Access, Restriction


def read_access(
    api_key: Path | None,
    admin_key: Path | None,
    http: Mapping[str, Restriction] | None = None,
    grpc: Mapping[str, Restriction] | None = None,
) -> Access:
    """A file of API keys may hold several, a line each."""
    keys = _key(api_key, API_KEY_VARIABLE, "--api-key"), _key(admin_key, ADMIN_KEY_VARIABLE, "--admin-key")
    return Access(*keys, http_restrictions=http or {}, grpc_restrictions=grpc or {})


def read_api_key(file: Path | None) -> str:
    """A client's: the first of the file, or of the environment where there is none; empty where nobody gave one."""
    return _key(file, API_KEY_VARIABLE, "--api-key").partition("\n")[0].strip()


def _key(file: Path | None, variable: str, option: str) -> str:
    if file is None:
        return os.environ.get(variable, "")
    try:
        key = file.expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        log("ERROR", f"{option}: the key file {file} cannot be read: {reason}")
        raise typer.Exit(1) from error
    if not key:
        log("ERROR", f"{option}: the key file {file} is empty")
        raise typer.Exit(1)
    return key
