"""`slipstream check`: report every problem of a model repository without loading weights."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.repository.check import check_repository


def create_parser() -> Parser:
    parser = Parser("slipstream check", "Report every problem of a model repository.")
    parser.add_argument("repository", type=Path, help="Folder that holds the models.")
    return parser


def run(given: Namespace) -> int:
    problems = check_repository(given.repository)
    for problem in problems.found:
        kind = "error" if problem.fatal else "warning"
        print(f"{kind}: {problem}", file=sys.stderr if problem.fatal else sys.stdout)
    errors = problems.count(fatal=True)
    counts = f"{_count(errors, 'error')}, {_count(problems.count(fatal=False), 'warning')}"
    verdict = "cannot be served" if errors else "can be served"
    print(f"{given.repository}: {counts}: {verdict}")
    return 1 if errors else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
