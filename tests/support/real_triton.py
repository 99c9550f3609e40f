"""Finds an installed Triton server, starts it on a repository and stops it.

`nvidia-pytriton` has the server and the Python backend in separate places. The backend also needs
the stub of its Python version. This module assembles a folder of backends.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TRITONSERVER"


def find_tritonserver() -> Path | None:
    """Return the binary that $TRITONSERVER names, or that of an installed nvidia-pytriton."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    found = importlib.util.find_spec("pytriton")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "tritonserver" / "bin" / "tritonserver"
    return binary if binary.is_file() else None


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def triton_command(
    binary: Path, repository: Path, folder: Path, ports: Sequence[int], *options: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and its environment. `ports` are those of HTTP, gRPC and metrics."""
    names = ("--http-port", "--grpc-port", "--metrics-port")
    command = [str(binary), f"--model-repository={repository}", *options]
    command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    environment = dict(os.environ)
    packages = binary.parents[3]
    if (stubs := binary.parents[1] / "python_backend_stubs").is_dir():
        backends = _backends(binary.parents[1] / "backends", stubs, packages, folder)
        command.append(f"--backend-directory={backends}")
        environment["LD_LIBRARY_PATH"] = str(packages / "nvidia_pytriton.libs")
        # The stub runs the first Python of its version on the path.
        environment["PATH"] = f"{packages.parents[2] / 'bin'}:{environment['PATH']}"
    return command, environment


class RealTriton:
    """`with RealTriton(binary, repository, folder) as server:` answers on `server.http_port`."""

    def __init__(
        self, binary: Path, repository: Path, folder: Path, *options: str, seconds: float = 120.0
    ) -> None:
        ports = free_ports(3)
        self.http_port, self.grpc_port, self.metrics_port = ports
        self._seconds = seconds
        self._log = (folder / "tritonserver.log").open("wb")
        self._command, self._environment = triton_command(
            binary, repository, folder, ports, *options
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RealTriton:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._seconds
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = Path(self._log.name).read_text("utf-8", "replace")
                self.__exit__()
                raise RuntimeError(f"the real Triton did not start:\n{text[-2000:]}")
            time.sleep(0.1)
        return self

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.http_port}/v2/health/ready", timeout=5
            ):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, *error: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def _backends(backends: Path, stubs: Path, packages: Path, folder: Path) -> Path:
    """Return a folder with the Python backend and the stub for the Python of the packages."""
    version = (
        packages.parent.name.removeprefix("python")
        if "python" in packages.parent.name
        else _own_version()
    )
    target = folder / "backends"
    shutil.copytree(backends / "python", target / "python", dirs_exist_ok=True)
    shutil.copy2(stubs / version / "triton_python_backend_stub", target / "python")
    return target


def _own_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
