"""The parts that build, convert and run share: tables of flags and the version line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.version import VERSION
from slipstream.weights.flags import SHORT_NAMES, Flag

NEWEST_RELEASE = "0.18.0"  # the newest release of the old tools whose flags are understood
_NUMBER_OF_VALUES: dict[str, dict[str, Any]] = {
    "nothing": {"action": "store_true"},
    "value": {"metavar": "VALUE"},
    "maybe": {"metavar": "VALUE", "nargs": "?", "const": ""},
    "values": {"metavar": "VALUE", "nargs": "*"},
}


def print_version_line() -> None:
    """Print the first line of the old tools, which scripts wait for."""
    version = f"{NEWEST_RELEASE} (Slipstream {VERSION} in its place)"
    print(f"[TensorRT-LLM] TensorRT-LLM version: {version}", flush=True)


def add_flags(parser: Parser, flags: Iterable[Flag]) -> None:
    """Declare a table of flags. A flag that is not given has no attribute in the result."""
    groups = {
        "used": parser,
        "explained": parser.no_effect_group(),
        "refused": parser.group("not supported"),
    }
    for flag in flags:
        names = [f"--{flag.name}"]
        if flag.name in SHORT_NAMES:
            names.append(f"-{SHORT_NAMES[flag.name]}")
        text = f"{flag.text[:1].upper()}{flag.text[1:].rstrip('.')}."
        groups[flag.effect].add_argument(
            *names, default=argparse.SUPPRESS, help=text, **_NUMBER_OF_VALUES[flag.takes]
        )


def explain_flags(flags: Iterable[Flag], given: argparse.Namespace) -> None:
    """Print a line for each given flag without effect, and refuse the first unsupported flag."""
    for flag in flags:
        if not hasattr(given, flag.name):
            continue
        if flag.effect == "refused":
            raise CommandError(f"--{flag.name}: {flag.text}")
        if flag.effect == "explained":
            print(f"[INFO] --{flag.name} has no effect: {flag.text}", flush=True)
