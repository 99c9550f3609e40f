"""What a client feels of a text model: time to the first token, between tokens and to the end, and
throughput.

The names and definitions are those of genai-perf. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from slipstream.bench.load import Record

_MS = 1_000_000
PERCENTILES = (99, 95, 90, 75, 50, 25)


@dataclass(frozen=True)
class Metric:
    """One row: what was measured for each request, in which unit."""

    name: str  # as in the JSON report
    unit: str
    values: tuple[float, ...]

    @property
    def statistics(self) -> dict[str, float]:
        values = numpy.array(self.values)
        return {
            "avg": float(values.mean()),
            **{
                f"p{percent}": float(numpy.percentile(values, percent))
                for percent in reversed(PERCENTILES)
            },
            "min": float(values.min()),
            "max": float(values.max()),
            "std": float(values.std()),
        }


@dataclass(frozen=True)
class LlmMetrics:
    rows: tuple[Metric, ...]  # in the order of the table
    output_tokens_per_second: float
    requests_per_second: float

    def by_name(self) -> Mapping[str, Metric]:
        return {row.name: row for row in self.rows}


def llm_metrics(
    records: Sequence[Record],
    count_tokens: Callable[[str], int],
    streaming: bool,
    text_names: tuple[str, str],
) -> LlmMetrics:
    """`text_names`: the model's text input and output. Only a model that streams has a time to its
    first token.
    """
    asked, answered = text_names
    inputs = [count_tokens(text_of(record.request.inputs.get(asked))) for record in records]
    outputs = [
        count_tokens("".join(text_of(one.get(answered)) for one in record.outputs))
        for record in records
    ]
    latencies = [record.latency / _MS for record in records]
    firsts = [(record.answered[0] - record.sent) / _MS for record in records]
    gaps = [
        (latency - first) / (count - 1)
        for latency, first, count in zip(latencies, firsts, outputs, strict=True)
        if count > 1
    ]
    seconds = (
        max(record.last for record in records) - min(record.sent for record in records)
    ) / 1e9
    rows = [Metric("time_to_first_token", "ms", tuple(firsts))] if streaming else []
    rows += [Metric("inter_token_latency", "ms", tuple(gaps))] if streaming and gaps else []
    rows += [
        Metric("request_latency", "ms", tuple(latencies)),
        Metric("output_sequence_length", "tokens", tuple(map(float, outputs))),
        Metric("input_sequence_length", "tokens", tuple(map(float, inputs))),
        Metric(
            "output_token_throughput_per_request",
            "tokens/sec",
            tuple(
                count / latency * 1000 for count, latency in zip(outputs, latencies, strict=True)
            ),
        ),
    ]
    return LlmMetrics(tuple(rows), sum(outputs) / seconds, len(records) / seconds)


def text_of(tensor: object) -> str:
    """The first text of a tensor; nothing where there is none."""
    if not isinstance(tensor, numpy.ndarray) or tensor.size == 0:
        return ""
    first = tensor.reshape(-1)[0]
    return (
        bytes(first).decode(errors="replace")
        if isinstance(first, (bytes, bytearray))
        else str(first)
    )
