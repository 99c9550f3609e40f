"""`slipstream check REPO`: everything that is wrong with a model repository, at once and without
loading weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.repository.check import check_repository


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream check", description="Say everything that is wrong with a model repository."
    )
    parser.add_argument("repository", type=Path, help="The folder that holds the models.")
    given = parser.parse(arguments)
    problems = check_repository(given.repository)
    for problem in problems.found:
        kind = "error" if problem.fatal else "warning"
        print(f"{kind}: {problem}", file=sys.stderr if problem.fatal else sys.stdout)
    errors, warnings = len(problems.errors), len(problems.warnings)
    verdict = "cannot be served" if errors else "can be served"
    print(
        f"{given.repository}: {_count(errors, 'error')}, {_count(warnings, 'warning')}: {verdict}"
    )
    return 1 if errors else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
