"""Settings of the gRPC port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import grpc

from slipstream.server.grpc.transport import GrpcServer, Transport
from slipstream.server.kserve.certificates import CertificateFiles, Reloaded

UNLIMITED = -1
Compression = Literal["none", "deflate", "gzip"]
_COMPRESSION = {"none": 0, "deflate": 1, "gzip": 2}  # gRPC's numbers of the algorithms


@dataclass(frozen=True)
class GrpcOptions:
    """Triton's defaults, except for the size of a request, which is bounded to protect memory."""

    transport: Transport = "core"  # falls back to "aio" where it cannot be used
    largest_request_bytes: int = 256 << 20  # requests carry whole tensors (adapters, embeddings)
    response_compression: Compression = "none"
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    share_port: bool = False  # whether other processes of this server listen at the port, too
    max_connection_age_ms: int = 0  # 0: unlimited
    max_connection_age_grace_ms: int = 0  # 0: unlimited
    server_certificate: Path | None = None  # certificate for TLS, together with its key
    server_key: Path | None = None
    root_certificate: Path | None = None  # certificate that those of clients must derive from

    def __post_init__(self) -> None:
        if self.transport not in get_args(Transport):
            raise ValueError(f"transport must be core or aio, got {self.transport!r}")
        if (self.server_certificate is None) != (self.server_key is None):
            raise ValueError("TLS needs both a certificate and its key")
        if self.root_certificate is not None and self.server_certificate is None:
            raise ValueError("client certificates need a server certificate")

    def channel_arguments(self) -> list[tuple[str, int]]:
        arguments = [
            ("grpc.max_receive_message_length", self.largest_request_bytes),
            ("grpc.max_send_message_length", UNLIMITED),
            ("grpc.default_compression_algorithm", _COMPRESSION[self.response_compression]),
            # two servers on one port must not look like success
            ("grpc.so_reuseport", int(self.share_port)),
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                self.http2_min_recv_ping_interval_without_data_ms,
            ),
            ("grpc.http2.max_ping_strikes", self.http2_max_ping_strikes),
        ]
        if self.max_connection_age_ms:
            arguments.append(("grpc.max_connection_age_ms", self.max_connection_age_ms))
        if self.max_connection_age_grace_ms:
            arguments.append(("grpc.max_connection_age_grace_ms", self.max_connection_age_grace_ms))
        return arguments

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the TLS credentials, None without TLS. Raises OSError for an unreadable file.

        Files that are replaced are used for new connections.
        """
        if self.server_certificate is None or self.server_key is None:
            return None
        files = CertificateFiles(self.server_certificate, self.server_key, self.root_certificate)
        current = Reloaded(files, _read_configuration)
        return grpc.dynamic_ssl_server_credentials(
            current.value,
            lambda: current.value if current.refresh() else None,
            require_client_authentication=files.root is not None,
        )


def _read_configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    root = None if files.root is None else files.root.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], root)


def add_port(server: GrpcServer, address: str, options: GrpcOptions) -> int:
    """Bind an address ("127.0.0.1:8001"), with TLS where `options` has it; return the port."""
    credentials = options.credentials()
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
