"""The problems of a repository, collected into one report.

Each problem is one line: the file, the line, the key, what is wrong, and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    file: str
    line: int  # line number; 0 for the whole file or folder
    key: str
    text: str
    fatal: bool = True  # False for a warning: the repository can still be served

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


@dataclass
class Problems:
    """The problems found so far. Every reader of a repository adds to the same list."""

    found: list[Problem] = field(default_factory=list)

    def error(self, file: object, line: int, key: str, text: str) -> None:
        self.found.append(Problem(str(file), line, key, text))

    def warn(self, file: object, line: int, key: str, text: str) -> None:
        self.found.append(Problem(str(file), line, key, text, fatal=False))

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.found if problem.fatal)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.found if not problem.fatal)


class RepositoryError(Exception):
    """The repository cannot be served. The text lists every fatal problem, one per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known word, or "" without a close one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
