"""Self-signed certificates, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make certificates"
)
_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
_NAMES = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a certificate for this machine and its key; return their paths."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", *_CURVE, *_NAMES, "-days", "2"]
    written = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *written], check=True, capture_output=True)
    return certificate, key
