"""The tables and figures that the old benchmark scripts print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class Sample:
    """One request: when it was sent and answered, in seconds, and its tokens."""

    sent: float
    answered: float
    input_tokens: int
    output_tokens: int

    @property
    def latency_ms(self) -> float:
        return (self.answered - self.sent) * 1000


def core_model_rows(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Stat and value, in the order and wording of benchmark_core_model.py."""
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
    """A box of two centred columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in (0, 1)]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [border, _line(header, widths), border, *(_line(row, widths) for row in rows), border]
    return "\n".join(lines)


def _line(row: tuple[str, str], widths: list[int]) -> str:
    return (
        "|"
        + "|".join(f" {_centred(text, width)} " for text, width in zip(row, widths, strict=True))
        + "|"
    )


def _centred(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)
