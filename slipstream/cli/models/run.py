"""`slipstream run MODEL`: fetch a model, serve it and chat with it, in one terminal.

With the flags of the old run.py, `slipstream run` is run.py instead (`cli/compat/run.py`).

Run as a program, this module is the server: a child process that ends with this one.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.cli import chat, start
from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.cli.compat import run as classic_run
from slipstream.cli.engine_flags import add_engine_flags, engine_overrides
from slipstream.cli.log import log
from slipstream.cli.models.served_model import find_model_to_serve, prepare_repository
from slipstream.repository.config import CONFIG_NAME
from slipstream.server.engine_link.child import API_KEY_VARIABLE, child_environment
from slipstream.server.log.parent_death import die_with

_HTTP = re.compile(r"Started HTTPService at (\S+:\d+)")
_LOOK_SECONDS = 0.05  # between two looks at the server's log
# exit timeout of the server, and the time it may take beyond that
_DRAIN_SECONDS = 1
_STOP_SECONDS = 15.0
_LOG_LINES = 12  # of a server that fails


def create_parser() -> Parser:
    parser = Parser(
        "slipstream run",
        "Fetch a model, serve it and chat with it, in one terminal. The server ends with the chat. "
        "Until then other clients can use it. With the flags of TensorRT-LLM's run.py, such as "
        "--max_output_len and --engine_dir: complete prompts without a server, as that script. The "
        "options of `slipstream start` for engines work here, too: see --help-all.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="An imported model, a known name, a folder, a GGUF file, or ORG/NAME on the hub.",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System message at the start of the conversation."
    )
    parser.add_argument(
        "--http-port",
        type=int,
        default=8000,
        metavar="PORT",
        help="Port for HTTP; 0: any free port. gRPC and metrics take free ports.",
    )
    add_engine_flags(parser, extended=True)
    return parser


def is_classic(words: Sequence[str]) -> bool:
    """Return whether these arguments have a flag that only the old run.py has."""
    own = create_parser().long_options()
    classic = classic_run.create_parser().long_options()
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        if not _begins_one(name, own) and _begins_one(name, classic):
            return True
    return False


def _begins_one(name: str, options: Iterable[str]) -> bool:
    return any(option.startswith(name) for option in options)


def run(given: Namespace) -> int:
    engine_overrides(given)  # raises UsageError before a model is fetched
    if given.http_port < 0:
        raise UsageError("--http-port must be a port number, or 0 for any free port")
    repository = prepare_repository(given.model, given.weight_only)
    with serving(repository, given) as address:
        return chat.run(chat.create_parser().parse(_chat_words(given, repository, address)))


def _chat_words(given: Namespace, repository: Path, address: str) -> list[str]:
    words = ["--url", address]
    name = find_model_to_serve(given.model, given.weight_only).name
    if (repository / name / CONFIG_NAME).is_file():  # not where MODEL is a whole repository
        words += ["--model", name]
    return words if given.system is None else [*words, f"--system={given.system}"]


@contextmanager
def serving(repository: Path, given: Namespace, key: str = "") -> Iterator[str]:
    """Serve a repository while the body runs, with the engine's options. Yields HOST:PORT.

    `key`: what clients must send, if it is not empty.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-run-") as folder:
        log_file = Path(folder) / "server.log"
        with log_file.open("wb") as output:
            server = subprocess.Popen(
                _server_command(repository, given),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment() | ({API_KEY_VARIABLE: key} if key else {}),
                start_new_session=True,  # Ctrl-C in the terminal stops an answer, not the server
            )
        try:
            yield _wait_ready(server, log_file)
        finally:
            _stop(server)


def _server_command(repository: Path, given: Namespace) -> list[str]:
    program = [sys.executable, "-P", "-m", "slipstream.cli.models.run", str(os.getpid())]
    ports = [f"--http-port={given.http_port}", "--grpc-port=0", "--metrics-port=0"]
    timeout = f"--exit-timeout-secs={_DRAIN_SECONDS}"
    return [*program, "start", "--repo", str(repository), *ports, timeout, *_engine_words(given)]


def _engine_words(given: Namespace) -> list[str]:
    """Return the options of `start` that were given to this command."""
    known = start.create_parser().long_options()
    words = []
    for action in create_parser().arguments:
        value = getattr(given, action.dest, None)
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or action.dest in ("http_port", "weight_only", "help"):
            continue
        if value == action.default or names[0].replace("_", "-") not in known:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(names[0] if value else f"--no-{names[0][2:]}")
        else:
            words += [names[0]] if action.nargs == 0 else [f"{names[0]}={value}"]
    return words


def _wait_ready(server: subprocess.Popen[bytes], log_file: Path) -> str:
    """Return the address of the server when it serves. Raises CommandError if it ends before."""
    log("INFO", "Loading the model")
    while True:
        text = log_file.read_text(encoding="utf-8", errors="replace")
        found = _HTTP.search(text)
        if found is not None:
            return found[1]
        if server.poll() is not None:
            last = "\n".join(text.splitlines()[-_LOG_LINES:])
            print(last, file=sys.stderr)
            raise CommandError("the server did not start, for the reason above")
        time.sleep(_LOOK_SECONDS)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _serve_below(parent: int, words: Sequence[str]) -> int:
    """Run a command as a process that ends with its parent."""
    from slipstream.cli.commands import run_command

    if not die_with(parent):
        return 1
    return run_command(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(_serve_below(int(sys.argv[1]), sys.argv[2:]))
