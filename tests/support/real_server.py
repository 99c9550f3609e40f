"""A real server with a real engine, in its own processes, on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.cli.commands import run_command
from slipstream.repository.fill import fill_text
from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import list_models

ROOT = Path(__file__).parents[2]
# Room for all requests of a test at once. The default cache of 512 MiB takes up to a second to
# clear.
CACHE_TOKENS = 16384
_STARTED = re.compile(
    r"\] Started (GRPCInferenceService|HTTPService|Metrics Service) at 127\.0\.0\.1:(\d+)"
)


def build_engine(model: Path, engine: Path, *flags: str) -> Path:
    words = ["--checkpoint_dir", str(model), "--output_dir", str(engine), "--dtype", "float32"]
    assert run_command("build", [*words, *flags]) == 0
    return engine


def write_repository(folder: Path, kind: str, release: str, engine: Path, **values: str) -> Path:
    """Write the templates of a release, filled with the engine, a small cache and `values`."""
    given = {"engine_dir": str(engine), "max_tokens_in_paged_kv_cache": str(CACHE_TOKENS), **values}
    for model in list_models(kind, release):
        write_model(folder / model, render_template(kind, model, release), given)
    return folder


def write_model(folder: Path, template: str, values: Mapping[str, str]) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(fill_text(template, values).text)


def limit_cache(repository: Path, tokens: int = CACHE_TOKENS) -> None:
    """Set the cache size of the engine in a repository that has none."""
    config = repository / "tensorrt_llm" / "config.pbtxt"
    unset = 'max_tokens_in_paged_kv_cache" value { string_value: "'
    text = config.read_text()
    assert unset in text
    config.write_text(text.replace(unset, f"{unset}{tokens}"))


class RealServer:
    def __init__(
        self,
        repository: Path,
        folder: Path,
        *command: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server. `command` replaces `slipstream start`; port flags are appended to it.

        variables: for its environment
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "server.log"
        # in float32 an answer does not depend on the other rows of its batch
        program = command or (
            "-m",
            "slipstream.cli.main",
            "start",
            "--repo",
            str(repository),
            "--dtype",
            "float32",
        )
        ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "SLIPSTREAM_HOME": str(folder / "home"),
            "PYTHONUNBUFFERED": "1",
            **(variables or {}),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *program, *ports], env=environment, stdout=log, stderr=log
            )
        self.ports: dict[str, int] = {}

    def wait(self, seconds: float = 60) -> RealServer:
        deadline = time.monotonic() + seconds
        while len(self.ports) < 3:
            assert self._process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.05)
            self.ports = {name: int(port) for name, port in _STARTED.findall(self.log())}
        return self

    @property
    def process_id(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def http(self) -> str:
        return f"localhost:{self.ports['HTTPService']}"

    @property
    def grpc(self) -> str:
        return f"localhost:{self.ports['GRPCInferenceService']}"

    @property
    def metrics(self) -> str:
        return f"localhost:{self.ports['Metrics Service']}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
