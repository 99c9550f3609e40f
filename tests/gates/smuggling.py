"""A proxy in front and the server see the same requests, whatever a client sends.

nginx passes what it accepts to the server over connections that it keeps. A request that the
server takes for two, or a body that it takes for a request, would be one that the proxy has not
seen: it could pass the proxy's rules, and its response would go to another client.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from http_support import RunningServer

from gates.table import Row
from slipstream.server.http.exchange import TEXT, ClientGone, Exchange

_INNER = b"GET /inner HTTP/1.1\r\nHost: h\r\n\r\n"
_CONFIG = """
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
    location / {{
      proxy_pass http://server;
      proxy_http_version 1.1;
      proxy_set_header Host $host;
      proxy_set_header Connection $http_connection;
      proxy_set_header Upgrade $http_upgrade;
      proxy_request_buffering {buffering};
      proxy_read_timeout 3s;
    }}
  }}
}}
"""


def _post(*headers: str, body: bytes = b"", length: bool = True) -> bytes:
    lines = ["POST /outer HTTP/1.1", "Host: h", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _corpus() -> dict[str, list[bytes]]:
    """Return what a client sends, in pieces with a pause between them."""
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_INNER), _INNER)
    te = "Transfer-Encoding"
    cases = {
        "plain": [_post(body=_INNER)],
        "Upgrade: h2c": [_post("Upgrade: h2c", "Connection: Upgrade", body=_INNER)],
        "Upgrade: websocket": [_post("Upgrade: websocket", "Connection: Upgrade", body=_INNER)],
        "Upgrade, HTTP2-Settings": [
            _post("Upgrade: h2c", "HTTP2-Settings: AAMA", "Connection: Upgrade, HTTP2-Settings"),
            _INNER,
        ],
        "Upgrade and chunked": [
            _post(f"{te}: chunked", "Upgrade: h2c", "Connection: Upgrade", length=False) + chunked
        ],
        "CL and TE": [_post(f"{te}: chunked", body=chunked)],
        "TE xchunked": [_post(f"{te}: xchunked", body=chunked)],
        "TE twice": [_post(f"{te}: chunked", f"{te}: identity", length=False) + chunked],
        "TE in a list": [_post(f"{te}: identity, chunked", length=False) + chunked],
        "TE with a space before the colon": [_post(f"{te} : chunked", body=chunked)],
        "TE with a tab": [_post(f"{te}:\tchunked", length=False) + chunked],
        "TE folded": [_post(f"{te}:\r\n chunked", length=False) + chunked],
        "TE in capitals": [_post(f"{te}: CHUNKED", length=False) + chunked],
        "CL twice, equal": [_post("Content-Length: 31", body=_INNER)],
        "CL twice, different": [_post("Content-Length: 0", body=_INNER)],
        "CL with a sign": [_post(f"Content-Length: +{len(_INNER)}", length=False) + _INNER],
        "CL with a list": [_post("Content-Length: 0, 31", length=False) + _INNER],
        "CL in hexadecimal": [_post("Content-Length: 0x1f", length=False) + _INNER],
        "no length": [_post(length=False) + _INNER],
        "GET with a body": [_post(body=_INNER).replace(b"POST", b"GET", 1)],
        "HEAD with a body": [_post(body=_INNER).replace(b"POST", b"HEAD", 1)],
        "absolute URI": [_post(body=_INNER).replace(b"/outer", b"http://other/outer", 1)],
        "Expect, body at once": [_post("Expect: 100-continue", body=_INNER)],
        "chunk extension": [
            _post(f"{te}: chunked", length=False) + chunked.replace(b"\r\n", b";a=b\r\n", 1)
        ],
        "chunk with a bare line feed": [
            _post(f"{te}: chunked", length=False) + chunked.replace(b"\r\n", b"\n", 1)
        ],
        "negative chunk": [_post(f"{te}: chunked", length=False) + b"-1\r\n" + chunked],
        "huge chunk": [_post(f"{te}: chunked", length=False) + b"f" * 17 + b"\r\n" + chunked],
        "trailers": [
            _post(f"{te}: chunked", "Trailer: x", length=False)
            + chunked[:-2]
            + b"Content-Length: 9\r\n\r\n"
        ],
        "bare line feeds": [_post(body=_INNER).replace(b"\r\n", b"\n", 4)],
        "null in a header": [_post("X: a\0b", body=_INNER)],
        "HTTP/1.0 with keep-alive": [
            _post("Connection: keep-alive", body=_INNER).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        ],
        "pipelined": [_post(body=b"a") + _post(body=b"b")],
    }
    for name in ("Upgrade: h2c", "plain", "CL and TE"):
        whole = cases[name][0]
        end = whole.index(b"\r\n\r\n") + 4
        cases[f"{name}, body later"] = [whole[:end], whole[end:]]
    return cases


async def run(folder: Path, long: bool) -> list[Row]:
    """`long`: nginx also sends bodies on as they arrive."""
    seen: list[str] = []

    async def record(exchange: Exchange) -> None:
        with suppress(ClientGone):
            body = await exchange.read_body(1 << 20)
            seen.append(f"{exchange.method} {exchange.path}")
            await exchange.respond(200, b"%d" % len(body), TEXT)

    rows = []
    with RunningServer(record) as server:
        if shutil.which("nginx"):
            for buffering in ("on", "off") if long else ("on",):
                rows += await _through_nginx(folder / buffering, server.port, buffering, seen, long)
        else:
            rows.append(Row("nginx", "not installed: apt-get install nginx-light", None))
        rows.append(_count(server.port, seen))
    return rows


async def _through_nginx(
    folder: Path, server: int, buffering: str, seen: list[str], long: bool
) -> list[Row]:
    folder.mkdir()
    rows = []
    with _nginx(folder, server, buffering) as port:
        for name, pieces in _corpus().items():
            row = await asyncio.to_thread(_try, name, pieces, port, seen, folder)
            if not row.holds or long or name.startswith("Upgrade"):
                rows.append(row)
    return rows


@contextmanager
def _nginx(folder: Path, server: int, buffering: str) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    config = folder / "nginx.conf"
    text = _CONFIG.format(folder=folder, server=server, port=port, buffering=buffering)
    config.write_text(text)
    process = subprocess.Popen(
        ["nginx", "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")],
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _answers(port):
            assert process.poll() is None, (folder / "error.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _try(name: str, pieces: list[bytes], port: int, seen: list[str], folder: Path) -> Row:
    """Send a case through the proxy. Compare what it has passed on with what the server saw."""
    log = folder / "access.log"
    passed_before = _passed(log)
    seen.clear()
    _send(port, pieces)
    passed = _passed(log)[len(passed_before) :]
    # an inner request would be seen without one of the proxy's
    smuggled = len(seen) > len(passed) or any("/inner" in one for one in seen) != any(
        "/inner" in one for one in passed
    )
    return Row(name, f"proxy passed {len(passed)}, server saw {len(seen)}", not smuggled)


def _passed(log: Path) -> list[str]:
    """Return the requests that the proxy has sent to the server."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if not line.endswith(" -")]


def _send(port: int, pieces: list[bytes]) -> bytes:
    """Send with pauses and read until the other end has nothing more to say."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        try:
            for number, piece in enumerate(pieces):
                if number:
                    connection.settimeout(0.2)
                    with suppress(TimeoutError):  # it waits for the rest
                        received += connection.recv(1 << 16)
                connection.sendall(piece)
            connection.settimeout(0.5)
            while data := connection.recv(1 << 16):
                received += data
        except OSError:
            pass  # closed, or silent: the other end has answered all that it saw
    return received


def _count(port: int, seen: list[str]) -> Row:
    """Without a proxy: no case is more than the requests that it is written as."""
    wrong = []
    for name, pieces in _corpus().items():
        seen.clear()
        _send(port, pieces)
        allowed = 2 if name in ("no length", "pipelined", "Upgrade, HTTP2-Settings") else 1
        if len(seen) > allowed:
            wrong.append(name)
    found = f"{len(wrong)} of {len(_corpus())} answered more than once {' '.join(wrong)}".rstrip()
    return Row("all cases without a proxy", found, not wrong)
