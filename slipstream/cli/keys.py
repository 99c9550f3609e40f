"""Who may use a server: API keys from files or the environment, certificates, names and origins.

Keys are never given on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path

from slipstream.cli.arguments import CommandError
from slipstream.server.engine_link.child import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from slipstream.server.kserve.access import Access, Restriction
from slipstream.server.kserve.certificates import CertificateFiles
from slipstream.server.kserve.origins import read_origin

CERTIFICATE_HELP = (
    "PEM file of the server's TLS certificate, read again when it changes (default: no TLS)."
)
CERTIFICATE_KEY_HELP = "PEM file of the certificate's private key (default: the certificate file)."
CORS_ORIGIN_HELP = (
    "Let web pages of this origin use the server, such as https://example.com; *: any"
)
ALLOWED_HOST_HELP = (
    "While HTTP listens on a loopback address: answer requests whose Host header has this name, "
    "besides localhost and addresses; *: any"
)


def read_access(
    api_key: Path | None,
    admin_key: Path | None,
    http: Mapping[str, Restriction] | None = None,
    grpc: Mapping[str, Restriction] | None = None,
    health_needs_key: bool = False,
) -> Access:
    """Return the keys that a server accepts. A file may hold several API keys, one per line."""
    keys = _server_key(api_key, API_KEY_VARIABLE, "--api-key")
    admin = _server_key(admin_key, ADMIN_KEY_VARIABLE, "--admin-key")
    if len(admin.splitlines()) > 1:
        where = ADMIN_KEY_VARIABLE
        if admin_key is not None:
            where = f"--admin-key: the key file {admin_key}"
        raise CommandError(f"{where} has several lines; there is one admin key")
    return Access(keys, admin, http or {}, grpc or {}, health_needs_key)


def origin(text: str) -> str:
    """Return the value of --cors-origin."""
    try:
        return read_origin(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def read_certificate(certificate: Path | None, key: Path | None) -> CertificateFiles | None:
    """Return the files of --ssl-certfile and --ssl-keyfile; None: no TLS."""
    if certificate is None:
        if key is not None:
            raise CommandError(f"--ssl-keyfile {key} needs --ssl-certfile")
        return None
    files = CertificateFiles(certificate.expanduser(), (key or certificate).expanduser())
    for file, option in ((files.certificate, "--ssl-certfile"), (files.key, "--ssl-keyfile")):
        try:
            file.read_bytes()
        except OSError as error:
            raise CommandError(f"{option}: {file} cannot be read: {error.strerror}") from error
    return files


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
