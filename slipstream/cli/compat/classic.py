"""The commands of the classic workflow: one file each, loaded when it runs, and called with its raw
arguments.

Each file has `main(arguments) -> exit code`, which the scripts of a workspace call as well.
"""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.cli.arguments import CommandError
from slipstream.cli.log import log

# name: (module, help)
COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("chat", "Talk to a model of a running server."),
    "convert": ("compat.convert", "Weights to a unified checkpoint (convert_checkpoint.py)."),
    "build": ("compat.build", "A checkpoint to an engine (trtllm-build, build.py)."),
    "run": ("compat.run", "Ask an engine without a server (run.py)."),
    "lora": ("compat.lora", "A PEFT adapter to request tensors (hf_lora_convert.py)."),
    "fill": ("compat.fill", "Fill a config.pbtxt template (fill_template.py)."),
    "workspace": ("compat.workspace", "Write a folder like the checkout the tutorials clone."),
    "launch": ("compat.launch", "Start the server in the background (launch_triton_server.py)."),
    "check": ("check", "Say everything that is wrong with a model repository."),
    "doctor": ("doctor.command", "Describe this machine, and what stands in the way of serving."),
    "client": ("compat.client", "Token-level reference client (inflight_batcher_llm_client.py)."),
    "verify": ("verify", "Compare an engine with the model it was made from."),
    "bench": ("profile", "Load on a text model: latencies and throughput (genai-perf)."),
    "profile": ("profile", "The same as bench, under Triton CLI's name."),
    "metrics": ("metrics_command", "A server's metrics as JSON."),
    "config": ("config_command", "A model's configuration as JSON."),
    "status": ("status_command", "Whether a server is live and ready."),
}
# Behind the scripts of a workspace only.
SCRIPTS = {
    "end-to-end-client": "compat.end_to_end_client",
    "speculative-client": "compat.speculative_client",
    "end-to-end-test": "compat.end_to_end_test",
    "identity-test": "compat.identity_test",
    "benchmark-core-model": "compat.benchmark_core_model",
    "genai-perf": "profile",
    "perf-analyzer": "compat.perf_analyzer",
    "gpt-client": "compat.gpt_client",
    "gpt-identity-test": "compat.gpt_identity_test",
    "gpt-input-data": "compat.gpt_input_data",
    "gpt-end-to-end-test": "compat.gpt_end_to_end_test",
    "gpt-convert": "compat.gpt_convert",
    "quantize": "compat.quantize",
}


def run_command(name: str, arguments: list[str]) -> int:
    """Run one command; whatever it refuses is one line on stderr and a code that is not 0."""
    module = importlib.import_module(
        f"slipstream.cli.{COMMANDS[name][0] if name in COMMANDS else SCRIPTS[name]}"
    )
    return guarded(module.main, arguments)


def guarded(main: Any, arguments: list[str]) -> int:
    try:
        return int(main(arguments) or 0)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # the reader of our output left; there is nobody to tell
    except KeyboardInterrupt:
        log("ERROR", "interrupted; nothing was left behind")
        return 130
    except (
        CommandError,
        ValueError,
        OSError,
    ) as error:  # what weights/ and repository/ refuse is a ValueError
        log("ERROR", str(error))
        return 1


def script(name: str) -> None:
    """The whole of a workspace's script or of a console command."""
    sys.exit(run_command(name, sys.argv[1:]))


def trtllm_build() -> None:
    script("build")


def genai_perf() -> None:
    script("genai-perf")


def perf_analyzer() -> None:
    script("perf-analyzer")


class _Classic(TyperCommand):
    """Takes everything after its name as it is, `--help` included."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        raw = list(args)
        context = super().make_context(info_name, [], parent=parent, **extra)
        context.obj = raw
        return context

    def invoke(self, ctx: Any) -> Any:
        assert self.name is not None
        raise typer.Exit(run_command(self.name, ctx.obj))


def register(app: typer.Typer) -> None:
    """Add the commands to an application, beside those its own group has."""
    own = app.info.cls if isinstance(app.info.cls, type) else TyperGroup

    class WithClassic(own):  # type: ignore[valid-type, misc]
        def list_commands(self, ctx: Any) -> list[str]:
            return [*super().list_commands(ctx), *COMMANDS]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in COMMANDS:
                return _Classic(cmd_name, help=COMMANDS[cmd_name][1])
            return super().get_command(ctx, cmd_name)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args[0] in COMMANDS:
                return args[0], self.get_command(ctx, args[0]), args[1:]
            others = super().list_commands(ctx)
            close = difflib.get_close_matches(args[0], [*others, *COMMANDS], n=1)
            if args[0] not in others and close and close[0] in COMMANDS:
                ctx.fail(f"No such command '{args[0]}'. Did you mean '{close[0]}'?")
            return super().resolve_command(ctx, args)

    app.info.cls = WithClassic
