"""TLS of the HTTP port. A certificate that is replaced on disk is used for new connections."""

from __future__ import annotations

import ssl

from slipstream.server.kserve.certificates import CertificateFiles, Reloaded

HANDSHAKE_SECONDS = 15.0  # longest time that a client has to begin
SHUTDOWN_SECONDS = 1.0  # longest wait for a client's end of TLS


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


def _read_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as error:
        text = f"{files.certificate} with the key {files.key} is no certificate: {error.reason}"
        raise OSError(text) from error
    return context


def _no_password() -> str:
    """Return an empty password: an encrypted key is an error, not a question at the terminal."""
    return ""
