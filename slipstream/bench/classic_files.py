"""The files of the old benchmark scripts: a row of figures, a trace of the requests, and figures to
compare with.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.classic_table import Sample

TRACE_NAME = "prfetto_dump.json"  # spelled as it always was


def append_row(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """The values as one more line of a CSV file; a new file begins with their names."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([name for name, _ in rows])
        writer.writerow([value for _, value in rows])


def write_trace(path: Path, samples: Sequence[Sample]) -> None:
    """The requests as a Chrome trace, which Perfetto opens: one line each, in microseconds from the
    first.
    """
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


def differing(
    path: Path, key: str, rows: Sequence[tuple[str, str]], absolute: float, relative: float
) -> list[str]:
    """What is wrong with the figures beside those of a file {key: {figure: value}}; nothing where
    all are near.
    """
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
        elif not math.isclose(
            found[name], value, abs_tol=absolute + relative * abs(value), rel_tol=0.0
        ):
            wrong.append(f"{name} is {found[name]}, which is not near {value}")
    return wrong or ([] if expected else [f"{path}: no figures for '{key}'"])
