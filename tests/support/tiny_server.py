"""A whole server with the scripted engine. Run as a script it is `slipstream` with that engine.

The words "0" to "999" are the tokens 0 to 999, so the answer to "5" is "6 7 8 …".
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from slipstream.model.spec import ModelSpec
from slipstream.repository.templates import write_repository
from slipstream.version import VERSION
from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
from slipstream.weights.parameters import Quantisation

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "counter"
CLOSE_SECONDS = "TINY_SERVER_CLOSE_SECONDS"
START_SECONDS = 120.0  # on a machine that other work keeps busy
TRITONSERVER = "tritonserver"
STARTED = re.compile(
    r"Started (GRPCInferenceService|HTTPService|Metrics Service) at 127\.0\.0\.1:(\d+)"
)


def make_repository(folder: Path, engine_name: str = "fine") -> Path:
    engine = folder / "engines" / engine_name
    engine.mkdir(parents=True)
    spec = ModelSpec("LlamaForCausalLM", 1000, 8, 1, 1, 1, 8, 8, 4096)
    limits = BuildLimits(max_input_len=2048, max_seq_len=4096)
    own = {"content_hash": "none", "files": {}, "source": "scripted"}
    document = config_document(
        VERSION, spec, "float32", Quantisation(), limits, GenerationDefaults(), own
    )
    (engine / "config.json").write_text(json.dumps(document))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {str(n): n for n in range(1000)}, "unk_token": "0"},
    }
    (engine / "tokenizer.json").write_text(json.dumps(tokenizer))
    (engine / "tokenizer_config.json").write_text("{}")
    write_repository(folder / "repository", MODEL, engine, engine, 64)
    return folder / "repository"


class TinyServer:
    """`slipstream start`, or `tritonserver`, on free ports, in a process of its own.

    `close_seconds` replaces the time for which connections of inactive clients are kept at exit.
    `script` runs `main` of this module under another name. `output`: a file for its lines, which
    are then not read.
    """

    def __init__(
        self,
        repository: Path,
        temporary: Path,
        *options: str,
        close_seconds: float | None = None,
        program: str = "start",
        script: Path = Path(__file__),
        output: Path | None = None,
    ) -> None:
        self._last_line = "Metrics Service" if program == TRITONSERVER else "API docs"
        self.temporary = temporary
        self.temporary.mkdir(exist_ok=True)
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        if program == TRITONSERVER:
            ports += ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"]
        source = ["--model-repository", str(repository)]
        command = [sys.executable, str(script), program, *source, *ports, *options]
        environment = os.environ | {
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        if close_seconds is not None:
            environment[CLOSE_SECONDS] = str(close_seconds)
        written = subprocess.PIPE if output is None else output.open("w")
        self.process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, text=True
        )
        if not isinstance(written, int):
            written.close()
        self.lines: list[str] = []
        self.ports: dict[str, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if found := STARTED.search(line):
                self.ports[found.group(1)] = int(found.group(2))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['HTTPService']}"

    def wait_started(self) -> TinyServer:
        wait_for(
            lambda: (
                any(self._last_line in line for line in self.lines)
                or self.process.poll() is not None
            ),
            START_SECONDS,
        )
        assert self.process.poll() is None, "\n".join(self.lines)
        return self

    def wait_exit(self) -> int:
        code = self.process.wait(30)
        self._reader.join(30)
        return code

    def engine_process(self) -> int:
        children = [
            found
            for found in children_of(self.process.pid)
            if "scripted_engine" in command_of(found)
        ]
        return children[0] if children else 0

    def remaining_files(self) -> list[str]:
        return [path.name for path in self.temporary.iterdir()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.wait_exit()


def children_of(process_id: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    found = []
    for thread in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            found += map(int, thread.read_text().split())
        except FileNotFoundError:
            continue  # the thread has ended
    return found


def parent_of(process_id: int) -> int:
    (line,) = (
        line
        for line in Path(f"/proc/{process_id}/status").read_text().splitlines()
        if line.startswith("PPid:")
    )
    return int(line.split()[1])


def command_of(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def main() -> None:
    from slipstream.server.engine_link import child as engine_child

    # before it is first read
    engine_child.ENGINE_COMMAND = (sys.executable, str(HERE / "scripted_engine.py"))
    if sys.argv[1] == TRITONSERVER:
        from slipstream.cli.compat.tritonserver import main as command

        del sys.argv[1]
    else:
        from slipstream.cli.main import main as command

    if CLOSE_SECONDS in os.environ:
        from slipstream.server import services

        services.CLOSE_SECONDS = float(os.environ[CLOSE_SECONDS])
    command()


if __name__ == "__main__":
    main()
