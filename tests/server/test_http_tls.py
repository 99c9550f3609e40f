"""HTTP over TLS: the certificate, its renewal, and what is not TLS."""

from __future__ import annotations

import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import NEEDS_OPENSSL, make_certificate
from http_support import Connection, RunningServer
from tiny_server import MODEL, TinyServer, make_repository

from slipstream.cli.arguments import CommandError
from slipstream.cli.keys import read_certificate
from slipstream.server.http.tls import check_certificate
from slipstream.server.kserve.certificates import CertificateFiles
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.lifecycle import SIGNALS, StartFailed, run_server
from slipstream.server.options import ServerOptions
from slipstream.server.services import create_app

pytestmark = NEEDS_OPENSSL


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(*make_certificate(tmp_path, "server"))


@pytest.fixture
def server(files: CertificateFiles) -> Iterator[RunningServer]:
    app = create_app(ModelRegistry(), ServerState([]))
    with RunningServer(app, certificate=files) as server:
        yield server


def live(server: RunningServer, certificate: Path) -> int:
    """Ask over a new connection, trusting only this certificate."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    url = f"https://localhost:{server.port}/v2/health/live"
    return httpx.get(url, verify=trusted, trust_env=False).status_code


def test_requests_are_encrypted(server: RunningServer, files: CertificateFiles) -> None:
    assert live(server, files.certificate) == 200


def test_a_request_without_tls_is_closed_without_a_response(server: RunningServer) -> None:
    with Connection(server.port) as connection:
        connection.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.is_closed(20)


def test_a_renewed_certificate_is_used_for_new_connections(
    server: RunningServer, files: CertificateFiles, tmp_path: Path
) -> None:
    former = tmp_path / "former.crt"
    shutil.copy(files.certificate, former)
    context = ssl.create_default_context(cafile=str(former))
    url = f"https://localhost:{server.port}/v2/health/live"
    with httpx.Client(verify=context, trust_env=False) as kept:
        assert kept.get(url).status_code == 200
        renewed, key = make_certificate(tmp_path, "renewed")
        key.replace(files.key)
        # between the two files of a change: the former certificate serves
        assert live(server, former) == 200
        renewed.replace(files.certificate)
        assert live(server, files.certificate) == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            live(server, former)
        assert kept.get(url).status_code == 200


def test_files_that_are_no_certificate_are_refused_by_name(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other_key = make_certificate(tmp_path, "two")
    missing = tmp_path / "missing"
    refused = {
        CertificateFiles(certificate, other_key): r"two\.key is not the private key of .*one\.crt$",
        CertificateFiles(other_key, other_key): r"two\.key is no certificate in PEM form: \w+$",
        CertificateFiles(certificate, certificate): r"one\.crt has no private key in PEM form",
        CertificateFiles(certificate, missing): r"missing cannot be read: No such file",
        CertificateFiles(certificate, key, key): r"one\.key is no certificate in PEM form: \w+$",
    }
    for files, problem in refused.items():
        with pytest.raises(OSError, match=problem):
            check_certificate(files)
    check_certificate(CertificateFiles(certificate, key, certificate))


def test_options_without_their_files_are_refused(tmp_path: Path) -> None:
    _, other_key = make_certificate(tmp_path, "two")
    with pytest.raises(CommandError, match=r"--ssl-certfile: .*missing cannot be read: No such"):
        read_certificate(tmp_path / "missing", None)
    with pytest.raises(CommandError, match="needs --ssl-certfile"):
        read_certificate(None, other_key)


@pytest.mark.parametrize("option", ["http_certificate", "grpc_settings"])
def test_a_start_checks_the_certificate_before_it_reads_the_repository(
    tmp_path: Path, option: str
) -> None:
    certificate, _ = make_certificate(tmp_path, "one")
    _, key = make_certificate(tmp_path, "two")
    values = {
        "http_certificate": CertificateFiles(certificate, key),
        "grpc_settings": {"server_certificate": certificate, "server_key": key},
    }
    options = ServerOptions((tmp_path / "no repository",), **{option: values[option]})
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with pytest.raises(StartFailed, match=r"TLS: .*two\.key is not the private key of"):
            run_server(options)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_the_server_of_a_command_serves_both_protocols_over_tls(tmp_path: Path) -> None:
    tritonclient = pytest.importorskip("tritonclient.grpc")
    certificate, key = make_certificate(tmp_path, "server")
    words = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--frontends", "2"]
    server = TinyServer(make_repository(tmp_path), tmp_path / "tmp", *words)
    try:
        server.wait_started()
        url = f"https://127.0.0.1:{server.ports['HTTPService']}"
        assert any(f"{url}/v1" in line for line in server.lines)
        trusted = ssl.create_default_context(cafile=str(certificate))
        body = {"text_input": "5", "max_tokens": 3}
        for _ in range(8):  # connections reach both front ends
            with httpx.Client(verify=trusted, trust_env=False, timeout=30) as client:
                answer = client.post(f"{url}/v2/models/{MODEL}/generate", json=body)
                assert answer.json()["text_output"] == "6 7 8"
        place = f"127.0.0.1:{server.ports['GRPCInferenceService']}"
        with tritonclient.InferenceServerClient(
            place, ssl=True, root_certificates=str(certificate)
        ) as client:
            assert client.is_server_ready()
    finally:
        server.close()
