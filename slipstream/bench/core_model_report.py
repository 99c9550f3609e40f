"""The report of benchmark_core_model.py: a table, a CSV row, a trace and a comparison."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

TRACE_NAME = "prfetto_dump.json"  # misspelled in the original too


@dataclass(frozen=True)
class Sample:
    """The times of one request, in seconds of a monotonic clock, and its numbers of tokens."""

    sent: float
    answered: float
    input_tokens: int
    output_tokens: int

    @property
    def latency_ms(self) -> float:
        return (self.answered - self.sent) * 1000


def core_model_rows(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return the rows of the table, in the order and wording of benchmark_core_model.py."""
    latencies = [sample.latency_ms for sample in samples]
    total = max(sample.answered for sample in samples) - min(sample.sent for sample in samples)
    output = sum(sample.output_tokens for sample in samples)
    figures = [
        ("Requests/Sec", len(samples) / total),
        ("OP tokens/sec", output / total),
        ("Avg. latency (ms)", float(numpy.mean(latencies))),
        ("P99 latency (ms)", float(numpy.percentile(latencies, 99))),
        ("P90 latency (ms)", float(numpy.percentile(latencies, 90))),
        (
            "Avg. IP tokens per request",
            float(numpy.mean([sample.input_tokens for sample in samples])),
        ),
        ("Avg. OP tokens per request", output / len(samples)),
        ("Avg. InFlight requests", sum(latencies) / 1000 / total),
        ("Total latency (ms)", total * 1000),
        ("Total requests", float(len(samples))),
    ]
    return [(name, f"{value:.2f}") for name, value in figures]


def table_text(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """Return a box of two centred columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [border, _line(header, widths), border, *(_line(row, widths) for row in rows), border]
    return "\n".join(lines)


def _line(row: tuple[str, str], widths: list[int]) -> str:
    cells = [f" {_centre(text, width)} " for text, width in zip(row, widths, strict=True)]
    return f"|{'|'.join(cells)}|"


def _centre(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def append_row(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Append the values to a CSV file. A new file begins with their names."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([name for name, _ in rows])
        writer.writerow([value for _, value in rows])


def write_trace(path: Path, samples: Sequence[Sample]) -> None:
    """Write the requests as a Chrome trace, which Perfetto opens: one track per request."""
    first = min(sample.sent for sample in samples)
    events = [
        {
            "name": f"req_{number}",
            "cat": "request",
            "ph": "X",
            "pid": 0,
            "tid": number,
            "ts": (sample.sent - first) * 1e6,
            "dur": (sample.answered - sample.sent) * 1e6,
            "args": {"input_tokens": sample.input_tokens, "output_tokens": sample.output_tokens},
        }
        for number, sample in enumerate(samples)
    ]
    path.write_text(json.dumps({"traceEvents": events}))


def find_differences(
    path: Path, key: str, rows: Sequence[tuple[str, str]], absolute: float, relative: float
) -> list[str]:
    """Return the differences from the figures of a JSON file {key: {figure: value}}."""
    try:
        wanted = json.loads(path.read_text(encoding="utf-8"))[key]
        expected = {name: float(value) for name, value in wanted.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{path}: no figures for '{key}': {error}"]
    found = {name: float(value) for name, value in rows}
    wrong = []
    for name, value in expected.items():
        if name not in found:
            wrong.append(f"there is no figure '{name}'; there are {', '.join(found)}")
            continue
        tolerance = absolute + relative * abs(value)
        if not math.isclose(found[name], value, abs_tol=tolerance, rel_tol=0.0):
            wrong.append(f"{name} is {found[name]}, which is not near {value}")
    if not expected:
        wrong.append(f"{path}: no figures for '{key}'")
    return wrong
