"""What the real server answered to each generated request, and the comparison with it.

A recording has each answer once, and for each request the number of its answer. A checksum shows
whether the requests are those that were recorded. `python tests/conformance/record_errors.py`
replaces the recordings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

GOLDEN = Path(__file__).parents[2] / "conformance" / "golden"
CRASH = "crash"  # in place of a status: the real server ended

Answer = tuple[str, ...]


class Case(Protocol):
    """An HttpCase or a GrpcCase."""

    @property
    def name(self) -> str: ...


class Difference(NamedTuple):
    """An answer that differs on purpose. `real` and `ours` begin the texts of the two answers."""

    group: str  # the beginning of the names of the requests
    real: str
    ours: str
    reason: str  # the same text as in docs/coming-from-triton.md


def checksum(cases: Iterable[Case]) -> str:
    return hashlib.sha256("\n".join(map(repr, cases)).encode()).hexdigest()


def write_recording(name: str, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    document = {
        "checksum": checksum(cases),
        "answers": list(numbers),
        "cases": [numbers[answer] for answer in answers],
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    (GOLDEN / f"{name}.json").write_text(text.replace("],[", "],\n[") + "\n", "utf-8")


def read_recording(name: str, cases: Sequence[Case]) -> list[Answer]:
    """Return the real server's answers in the order of the requests."""
    document = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    changed = "the generated requests have changed: run tests/conformance/record_errors.py"
    assert document["checksum"] == checksum(cases), changed
    answers = [tuple(answer) for answer in document["answers"]]
    return [answers[number] for number in document["cases"]]


def compare(
    cases: Sequence[Case],
    real: Sequence[Answer],
    ours: Sequence[Answer],
    differences: Sequence[Difference],
) -> list[str]:
    """Return what differs beyond the list, and the entries of the list that nothing needs."""
    unused = list(differences)
    problems = []
    for case, expected, found in zip(cases, real, ours, strict=True):
        if expected == found:
            continue
        entry = _find(differences, case, expected, found)
        if entry is None:
            problems.append(f"{case}\n  real: {expected}\n  ours: {found}")
        elif entry in unused:
            unused.remove(entry)
    return problems + [f"not needed: {entry}" for entry in unused]


def _find(
    differences: Sequence[Difference], case: Case, real: Answer, ours: Answer
) -> Difference | None:
    for entry in differences:
        if (
            case.name.startswith(entry.group)
            and _text(real).startswith(entry.real)
            and _text(ours).startswith(entry.ours)
        ):
            return entry
    return None


def _text(answer: Answer) -> str:
    """Return status and text of an answer, without the content type and the key of the error."""
    text = answer[-1].removeprefix('{"error":"')
    return f"{answer[0]} {text}"
