"""The programs with the old tools' names, and the scripts of a workspace."""

from __future__ import annotations

import sys

from slipstream.cli.commands import run_command


def script(name: str) -> None:
    """Run a command with the arguments of this process, and exit."""
    sys.exit(run_command(name, sys.argv[1:]))


def trtllm_build() -> None:
    script("build")


def genai_perf() -> None:
    script("genai-perf")


def perf_analyzer() -> None:
    script("perf-analyzer")
