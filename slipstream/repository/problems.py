"""The problems of a repository, collected into one report.

Each problem is one line: the file, the line, the key, what is wrong, and what is allowed.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_MAX_ERRORS = 20  # of one file that are kept
_MAX_WARNINGS = 100  # a template with unfilled variables has about 60
_MAX_CHARACTERS = 600  # of a problem's text or key


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
    """The problems found so far. Every reader of a repository adds to the same list.

    A file that is wrong in every line has as many problems as lines, so the first of each file are
    kept and the others counted.
    """

    _kept: list[Problem] = field(default_factory=list)
    _counts: Counter[tuple[str, bool]] = field(default_factory=Counter)  # by file and `fatal`

    def error(self, file: object, line: int, key: str, text: str) -> None:
        self._add(Problem(str(file), line, _shorten(key), _shorten(text)))

    def warn(self, file: object, line: int, key: str, text: str) -> None:
        self._add(Problem(str(file), line, _shorten(key), _shorten(text), fatal=False))

    def keeps_errors(self, file: str) -> bool:
        """Return whether the text of another error of this file would be kept."""
        return self._counts[file, True] < _MAX_ERRORS

    def keeps_warnings(self, file: str) -> bool:
        return self._counts[file, False] < _MAX_WARNINGS

    @property
    def found(self) -> list[Problem]:
        """Return the problems, errors first, then by file and line."""

        def order(problem: Problem) -> tuple[bool, str, bool, int]:
            return (not problem.fatal, problem.file, problem in rest, problem.line)

        rest = [*self._count_rest(fatal=True), *self._count_rest(fatal=False)]
        return sorted([*self._kept, *rest], key=order)

    @property
    def errors(self) -> tuple[Problem, ...]:
        return (*(problem for problem in self._kept if problem.fatal), *self._count_rest(True))

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return (*(problem for problem in self._kept if not problem.fatal), *self._count_rest(False))

    def count(self, fatal: bool) -> int:
        """Return the number of errors or warnings, with those that were not kept."""
        return sum(count for (_, kind), count in self._counts.items() if kind is fatal)

    def _add(self, problem: Problem) -> None:
        most = _MAX_ERRORS if problem.fatal else _MAX_WARNINGS
        if self._counts[problem.file, problem.fatal] < most:
            self._kept.append(problem)
        self._counts[problem.file, problem.fatal] += 1

    def _count_rest(self, fatal: bool) -> Iterator[Problem]:
        """Yield a line for each file that has more problems than were kept."""
        most = _MAX_ERRORS if fatal else _MAX_WARNINGS
        noun = "errors" if fatal else "warnings"
        for (file, kind), count in self._counts.items():
            if kind is fatal and count > most:
                yield Problem(file, 0, "", f"and {count - most} more {noun}", fatal)


def _shorten(text: str) -> str:
    """Return a text whose middle is left out if it is long, as a file's own texts may be."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


class RepositoryError(Exception):
    """The repository cannot be served. The text lists every fatal problem, one per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known word, or "" without a close one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
