"""The flags that `genai-perf … -- FLAGS` and `triton profile … -- FLAGS` pass to perf_analyzer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slipstream.bench.perf_analyzer import parse_levels
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.perf_analyzer import create_parser

# flags with the same meaning in both commands, by the names of their values
_SAME = (
    "batch_size",
    "max_trials",
    "measurement_interval",
    "request_count",
    "service_kind",
    "stability_percentage",
    "streaming",
    "url",
    "warmup_request_count",
)
_NO_EFFECT = ("is_async", "sync", "max_threads", "verbose")
_TRANSLATED = (
    "concurrency_range",
    "measurement_mode",
    "measurement_request_count",
    "protocol",
    "request_rate_range",
)


def read_passed_flags(words: Sequence[str], program: str) -> dict[str, Any]:
    """Return the options of genai-perf that have the same effect as these flags.

    Raises CommandError for a flag of perf_analyzer that has no equivalent.
    """
    parser = create_parser()
    parser.prog = program
    known = parser.long_options()
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            raise _unavailable(name)
    for action in parser.arguments:  # only the flags that are given
        action.default = argparse.SUPPRESS
        action.required = False
    given = vars(parser.parse(words))
    for name in given:
        if name not in (*_SAME, *_NO_EFFECT, *_TRANSLATED):
            raise _unavailable(_flag(parser, name))
    if given.get("protocol", "grpc") != "grpc":
        raise CommandError(f"-i {given['protocol']} after --: only grpc is measured here")
    return {name: given[name] for name in _SAME if name in given} | _translate(given)


def _unavailable(flag: str) -> CommandError:
    return CommandError(f"{flag} after -- is not available here; leave it out")


def _translate(given: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "concurrency_range" in given:
        levels = parse_levels(given["concurrency_range"])
        if any(level != int(level) for level in levels):
            raise CommandError("--concurrency-range after -- takes whole numbers")
        options["concurrency"] = [int(level) for level in levels]
    if "request_rate_range" in given:
        rates = parse_levels(given["request_rate_range"])
        if len(rates) != 1:
            raise CommandError("--request-rate-range after -- takes one rate")
        options["request_rate"] = rates[0]
    if given.get("measurement_mode") == "count_windows" and not given.get("request_count"):
        options["request_count"] = given.get("measurement_request_count", 50)
    return options


def _flag(parser: Parser, name: str) -> str:
    """Return the long spelling of the flag whose value has this name."""
    action = next(action for action in parser.arguments if action.dest == name)
    return action.option_strings[-1]
