"""nginx and HAProxy as processes, and how many requests each has passed to the server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_ports

_NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  log_format upstream '$request_method $uri $upstream_status';
  upstream server {{ server 127.0.0.1:{server}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    access_log {folder}/access.log upstream;
    client_header_timeout 2s;
    client_body_timeout 2s;
    location / {{
      proxy_pass http://server;
      proxy_http_version 1.1;
      proxy_set_header Host $host;
      proxy_set_header Connection $http_connection;
      proxy_set_header Upgrade $http_upgrade;
      proxy_next_upstream off;
      {options}
      proxy_read_timeout 3s;
    }}
  }}
}}
"""
_HAPROXY = """
global
  log stdout format raw local0
defaults
  mode http
  log global
  log-format "request %HM %ST %s"
  http-reuse always
  retries 0
  timeout connect 2s
  timeout client 2s
  timeout server 3s
frontend clients
  bind 127.0.0.1:{port}
  {options}
  default_backend servers
backend servers
  server one 127.0.0.1:{server}
"""
# Options that make a proxy pass more than by default, by the name of the configuration.
VARIANTS = {
    "nginx": {"": "", " without buffering": "proxy_request_buffering off;"},
    "haproxy": {"": "", " with invalid requests": "option accept-invalid-http-request"},
}


@dataclass(frozen=True)
class Proxy:
    port: int
    passed: Callable[[], int]  # requests so far


@contextmanager
def nginx(folder: Path, server: int, options: str) -> Iterator[Proxy]:
    (port,) = free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, server=server, port=port, options=options))
    errors = folder / "error.log"
    log = folder / "access.log"
    command = ["nginx", "-c", str(config), "-p", str(folder), "-e", str(errors)]
    with _running(command, folder / "output", port):
        yield Proxy(port, lambda: _attempts(_lines(log)))


@contextmanager
def haproxy(folder: Path, server: int, options: str) -> Iterator[Proxy]:
    (port,) = free_ports(1)
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(server=server, port=port, options=options))
    log = folder / "output"
    program = shutil.which("haproxy")
    assert program is not None
    with _running([program, "-f", str(config)], log, port):
        yield Proxy(port, lambda: sum(line.endswith(" one") for line in _lines(log)))


PROXIES = {"nginx": nginx, "haproxy": haproxy}


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _attempts(lines: list[str]) -> int:
    """Return how often nginx has sent a request to the server: it logs `-` if it has not."""
    return sum(not line.endswith(" -") for line in lines)


@contextmanager
def _running(command: list[str], output: Path, port: int) -> Iterator[None]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 20
        while not _answers(port):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
