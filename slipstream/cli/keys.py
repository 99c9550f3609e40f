"""API keys from files or the environment; never from the command line, where every user of the machine reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from slipstream.server.access import Access, Restriction

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
ADMIN_KEY_VARIABLE = "SLIPSTREAM_ADMIN_KEY"


def read_access(
    api_key: Path | None,
    admin_key: Path | None,
    http: Mapping[str, Restriction] | None = None,
    grpc: Mapping[str, Restriction] | None = None,
) -> Access:
    keys = _key(api_key, API_KEY_VARIABLE, "--api-key"), _key(admin_key, ADMIN_KEY_VARIABLE, "--admin-key")
    return Access(*keys, http_restrictions=http or {}, grpc_restrictions=grpc or {})


def _key(file: Path | None, variable: str, option: str) -> str:
    if file is None:
        return os.environ.get(variable, "")
    try:
        key = file.expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        typer.echo(f"error: {option}: the key file {file} cannot be read: {reason}", err=True)
        raise typer.Exit(1) from error
    if not key:
        typer.echo(f"error: {option}: the key file {file} is empty", err=True)
        raise typer.Exit(1)
    return key
