"""Two servers behind nginx with the settings of deploy/nginx, and clients that use them all the time."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path

import httpx
from free_ports import free_ports
from manifests import DEPLOY
from tiny_server import MODEL, TRITONSERVER, TinyServer, make_repository, wait_for

CONFIGURATION = DEPLOY / "nginx" / "slipstream.conf"
CLIENTS = 6
TOKENS = 20
STEP_MILLISECONDS = 10
EXPECTED = " ".join(str(number) for number in range(6, 6 + TOKENS))
BODY = {"text_input": "5", "max_tokens": TOKENS, "random_seed": STEP_MILLISECONDS}


class Site:
    """Two servers with fixed ports, and nginx before them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._repository = make_repository(folder)
        self.http, self.grpc, *ports = free_ports(6)
        self._ports = {"10.0.0.1": ports[:2], "10.0.0.2": ports[2:]}
        self.servers = {address: self.start(address) for address in self._ports}
        for server in self.servers.values():
            server.wait_started()
        self._nginx = self._start_nginx()
        wait_for(self._listens)

    def start(self, address: str) -> TinyServer:
        http, grpc = self._ports[address]
        ports = [f"--http-port={http}", f"--grpc-port={grpc}"]
        return TinyServer(self._repository, self._folder / address, *ports, program=TRITONSERVER)

    def restart(self, address: str) -> int:
        """Stop a server and start it again; return the exit code of the first one."""
        self.servers[address].process.send_signal(signal.SIGTERM)
        code = self.servers[address].wait_exit()
        self.servers[address] = self.start(address).wait_started()
        return code

    def _start_nginx(self) -> subprocess.Popen[bytes]:
        text = CONFIGURATION.read_text()
        replaced = {"listen 80;": f"listen {self.http};", "listen 81 ": f"listen {self.grpc} "}
        for address, (http, grpc) in self._ports.items():
            replaced |= {
                f"{address}:8000": f"127.0.0.1:{http}", f"{address}:8001": f"127.0.0.1:{grpc}",
            }  # fmt: skip
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        (self._folder / "site.conf").write_text(text)
        main = self._folder / "nginx.conf"
        main.write_text(
            f"daemon off; pid {self._folder}/pid; error_log {self._folder}/error.log;\n"
            f"events {{}}\nhttp {{ access_log off; include {self._folder}/site.conf; }}\n"
        )
        return subprocess.Popen(["nginx", "-c", str(main), "-p", str(self._folder)])

    def _listens(self) -> bool:
        assert self._nginx.poll() is None, (self._folder / "error.log").read_text()
        try:
            return httpx.get(f"{self.url}/v2/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def close(self) -> None:
        self._nginx.terminate()
        self._nginx.wait(30)
        for server in self.servers.values():
            server.close()


class Load:
    """Clients that send requests until they are stopped, and keep what went wrong."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v2/models/{MODEL}"
        self._stopping = threading.Event()
        self.answers = 0
        self.problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, streams: bool) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopping.is_set():
                try:
                    found = self._stream(client) if streams else self._generate(client)
                except (httpx.HTTPError, ValueError) as error:
                    found = repr(error)
                self.answers += 1
                if found != EXPECTED:
                    self.problems.append(found)

    def _generate(self, client: httpx.Client) -> str:
        found = client.post(f"{self._url}/generate", json=BODY)
        text: str = found.json().get("text_output", f"{found.status_code} {found.text}")
        return text.strip()

    def _stream(self, client: httpx.Client) -> str:
        body = BODY | {"stream": True}
        pieces = []
        with client.stream("POST", f"{self._url}/generate_stream", json=body) as found:
            for line in found.iter_lines():
                if line.startswith("data: "):
                    pieces.append(json.loads(line[6:])["text_output"])
        return "".join(pieces).strip()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
