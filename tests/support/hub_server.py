"""A local server with the part of the hub's protocol that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    folders: dict[str, Path]  # repository → folder with its files
    token: str | None = None  # token that requests for gated repositories need
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)  # "METHOD path"
    url: str = ""

    def downloaded(self) -> set[str]:
        return {
            line.rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        }


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *values: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            parts = path.removeprefix("/api/models").strip("/").split("/")
            repository = "/".join(parts[:2])
            if repository not in hub.folders:
                self._send(
                    401,
                    b"{}",
                    {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"},
                )
            elif (
                repository in hub.gated
                and self.headers.get("Authorization") != f"Bearer {hub.token}"
            ):
                self._send(
                    403,
                    b"{}",
                    {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"},
                )
            else:
                self._answer_for(hub.folders[repository], parts[2:])

        def _answer_for(self, folder: Path, rest: list[str]) -> None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            if rest[:1] == ["revision"]:
                siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
                self._send_json(
                    {"id": "x/y", "sha": COMMIT, "siblings": siblings, "private": False}
                )
            elif rest[:1] == ["tree"]:
                self._send_json(
                    [
                        {
                            "type": "file",
                            "path": str(path.relative_to(folder)),
                            "oid": _etag(path),
                            "size": path.stat().st_size,
                        }
                        for path in files
                    ]
                )
            elif rest[:1] == ["resolve"] and (folder / "/".join(rest[2:])).is_file():
                path = folder / "/".join(rest[2:])
                self._send(
                    200, path.read_bytes(), {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
                )
            else:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        def _send_json(self, document: object) -> None:
            self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
