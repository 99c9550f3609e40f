"""The commands of `slipstream`, and how one of them is run.

The module of a command is imported when the command runs, so that `slipstream --help` is immediate.
Each module has `create_parser() -> Parser` and `run(given: Namespace) -> int`, the exit code.
"""

from __future__ import annotations

import importlib
import signal
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.cli.interrupts import INTERRUPTED, INTERRUPTED_LINE, raise_at_interrupt
from slipstream.cli.log import log, program
from slipstream.progress import size_text


class Command(NamedTuple):
    """A command's module, without `slipstream.cli.`, and its line in the help."""

    module: str
    help: str


class CommandModule(Protocol):
    def create_parser(self) -> Parser: ...

    def run(self, given: Namespace) -> int: ...


class RunModule(CommandModule, Protocol):
    """The module of `run`, which is two commands."""

    def is_classic(self, words: Sequence[str]) -> bool: ...


# title of a section of the help: its commands
GROUPS: dict[str, dict[str, Command]] = {
    "Use": {
        "start": Command("start", "Serve a model repository or one model."),
        "serve": Command("start", "The same as start."),
        "run": Command("models.run", "Fetch, serve and chat with a model; or run.py by its flags."),
        "chat": Command("chat", "Chat with a model of a running server."),
        "infer": Command("infer", "Send one prompt to a running server."),
        "batch": Command("batch", "Answer the requests of a file in OpenAI's batch format."),
        "import": Command("models.import_model", "Add a model to the repository, or replace it."),
        "list": Command("models.list_models", "List the models, with size, type and source."),
        "show": Command("models.show", "Print what a model is, and where its files are."),
        "remove": Command("models.remove_model", "Remove a model, and free its disk."),
        "prune": Command("models.prune", "Free the disk of engines that nothing uses."),
    },
    "Operate": {
        "ps": Command("processes.ps", "List the servers that run on this machine."),
        "stop": Command("processes.stop", "Stop a server of this machine."),
        "status": Command("status", "Print a server's version, models and states, or metrics."),
        "metrics": Command("metrics", "The same as status --metrics."),
        "config": Command("config", "The same as status --config MODEL."),
        "bench": Command("bench", "Measure latency and throughput of a text model."),
        "doctor": Command("doctor.command", "Describe this machine and find problems."),
        "completion": Command("completion", "Print a script for completion in a shell."),
    },
    "Triton and TensorRT-LLM": {
        "convert": Command(
            "compat.convert", "Convert weights to a checkpoint (convert_checkpoint.py)."
        ),
        "build": Command("compat.build", "Build an engine from a checkpoint (trtllm-build)."),
        "lora": Command("compat.lora", "Convert a LoRA adapter (hf_lora_convert.py)."),
        "fill": Command("compat.fill", "Fill a config.pbtxt template (fill_template.py)."),
        "workspace": Command("compat.workspace", "Write the folder that the tutorials clone."),
        "launch": Command(
            "compat.launch", "Start a server in the background (launch_triton_server.py)."
        ),
        "client": Command(
            "compat.client", "Send tokens to an engine (inflight_batcher_llm_client.py)."
        ),
        "check": Command("check", "Report every problem of a model repository."),
        "verify": Command("models.verify", "Compare a model's engine with its original model."),
        "profile": Command("compat.genai_perf", "The same as bench (genai-perf)."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

# commands that work and are not listed in the help: each is another one by a second name
HIDDEN = {"serve": "start", "profile": "bench", "metrics": "status", "config": "status"}

# other names of commands, as Ollama has them; `pull NAME` is `import -m NAME`
ALIASES = {"pull": "import", "ls": "list", "rm": "remove"}

# commands that may fetch a model
FETCHING = ("start", "serve", "run", "import", "batch")

# command behind a script of a workspace: its module
SCRIPTS = {
    "end-to-end-client": "compat.end_to_end_client",
    "speculative-client": "compat.speculative_client",
    "end-to-end-test": "compat.end_to_end_test",
    "identity-test": "compat.identity_test",
    "benchmark-core-model": "compat.benchmark_core_model",
    "genai-perf": "compat.genai_perf",
    "perf-analyzer": "compat.perf_analyzer",
    "gpt-client": "compat.gpt.client",
    "gpt-identity-test": "compat.gpt.identity_test",
    "gpt-input-data": "compat.gpt.gen_input_data",
    "gpt-end-to-end-test": "compat.gpt.end_to_end_test",
    "gpt-convert": "compat.gpt.hf_gpt_convert",
    "quantize": "compat.quantize",
    "classic-run": "compat.run",
}


def load_command(name: str) -> CommandModule:
    """Import the module of a command or of a workspace's script."""
    module = COMMANDS[name].module if name in COMMANDS else SCRIPTS[name]
    return cast(CommandModule, importlib.import_module(f"slipstream.cli.{module}"))


def resolve_alias(words: Sequence[str]) -> list[str]:
    """Return a command line with the command in place of its alias."""
    name, *arguments = words
    if name not in ALIASES:
        return list(words)
    command = ALIASES[name]
    if command == "import" and arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "-m")
    return [command, *arguments]


def create_parser(name: str) -> Parser:
    """Return a command's parser. Its help and errors use the name that the user typed."""
    parser = load_command(name).create_parser()
    if name in COMMANDS:
        parser.prog = f"{program()} {name}"
    return parser


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. A failure is one line on stderr."""
    if name == "run" and cast(RunModule, load_command(name)).is_classic(arguments):
        name = "classic-run"
    try:
        parser = create_parser(name)
        given = parser.parse(arguments)
        raise_at_interrupt()
        return load_command(name).run(given)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # the reader of our output is gone, and of our errors too
    except KeyboardInterrupt:
        log("ERROR", _interrupted_line(name))
        return INTERRUPTED
    except UsageError as error:
        parser.error(str(error))
    except (CommandError, ValueError, OSError) as error:
        # weights/ and repository/ report bad input with subclasses of ValueError
        log("ERROR", str(error))
        return 1


def _interrupted_line(name: str) -> str:
    """Return what Ctrl-C has left: a finished download is kept for the next try."""
    if name in FETCHING:
        from slipstream.cli.models.downloads import built_sources, unused_downloads

        kept = sum(download.bytes for download in unused_downloads(built_sources()))
        if kept:
            return (
                f"interrupted; a download of {size_text(kept)} is kept for the next try "
                f"({program()} prune removes it)"
            )
    return INTERRUPTED_LINE
