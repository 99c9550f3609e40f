"""TLS of the HTTP port. A certificate that is replaced on disk is used for new connections."""

from __future__ import annotations

import ssl
from pathlib import Path

from slipstream.server.kserve.certificates import CertificateFiles, Reloaded

HANDSHAKE_SECONDS = 15.0  # longest time that a client has to begin
SHUTDOWN_SECONDS = 1.0  # longest wait for a client's end of TLS
_MISMATCH = "KEY_VALUES_MISMATCH"  # OpenSSL's reason


def create_tls_context(files: CertificateFiles) -> ssl.SSLContext:
    """Return the context of a listening port.

    Raises OSError (ssl.SSLError is one) with a text that names the file.
    """
    current = Reloaded(files, _read_context)
    listening = _read_context(files)

    def use_current(
        connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called for each connection before its certificate is chosen."""
        current.refresh()
        connection.context = current.value

    listening.sni_callback = use_current
    return listening


def check_certificate(files: CertificateFiles) -> None:
    """Raise OSError with a text that names the file that is missing, or no certificate or key."""
    _check_readable(files)
    context = _read_context(files)
    if files.root is not None:
        _load_authorities(context, files.root)


def _check_readable(files: CertificateFiles) -> None:
    for file in filter(None, (files.certificate, files.key, files.root)):
        try:
            file.read_bytes()
        except OSError as error:
            raise OSError(f"{file} cannot be read: {error.strerror}") from error


def _read_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as error:
        # the error does not say which of the two files it is about
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.certificate)
        if error.reason == _MISMATCH:
            text = f"{files.key} is not the private key of the certificate {files.certificate}"
        else:
            text = f"{files.key} has no private key in PEM form without a password: {error.reason}"
        raise OSError(text) from error
    return context


def _load_authorities(context: ssl.SSLContext, file: Path) -> None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise OSError(f"{file} is no certificate in PEM form: {error.reason}") from error


def _no_password() -> str:
    """Return an empty password: an encrypted key is an error, not a question at the terminal."""
    return ""
