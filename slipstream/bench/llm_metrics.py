"""Latency and throughput of a text model, as its clients see them.

The names and definitions are those of genai-perf. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from slipstream.bench.load import Record
from slipstream.client.tensors import Array, first_text

_MS = 1_000_000  # nanoseconds
PERCENTILES = (99, 95, 90, 75, 50, 25)


@dataclass(frozen=True)
class Metric:
    """One measured quantity, with a value for each request."""

    name: str  # name in the JSON report
    unit: str
    values: tuple[float, ...]

    @property
    def statistics(self) -> dict[str, float]:
        values = numpy.array(self.values)
        found = {"avg": float(values.mean())}
        for percent in reversed(PERCENTILES):
            found[f"p{percent}"] = float(numpy.percentile(values, percent))
        found["min"] = float(values.min())
        found["max"] = float(values.max())
        found["std"] = float(values.std())
        return found


@dataclass(frozen=True)
class LlmMetrics:
    rows: tuple[Metric, ...]  # rows of the table, in its order
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
    """Return the metrics of a load. `text_names`: the model's text input and output.

    Only a streamed answer has a time to its first token.
    """
    input_name, output_name = text_names
    inputs = [count_tokens(_first_text(record.request.inputs, input_name)) for record in records]
    outputs = [count_tokens(_answer_text(record, output_name)) for record in records]
    latencies = [record.latency / _MS for record in records]
    rows = _streaming_rows(records, outputs) if streaming else []
    rows.append(Metric("request_latency", "ms", tuple(latencies)))
    rows.append(Metric("output_sequence_length", "tokens", tuple(map(float, outputs))))
    rows.append(Metric("input_sequence_length", "tokens", tuple(map(float, inputs))))
    rates = [count / latency * 1000 for count, latency in zip(outputs, latencies, strict=True)]
    rows.append(Metric("output_token_throughput_per_request", "tokens/sec", tuple(rates)))
    start = min(record.sent for record in records)
    seconds = (max(record.last for record in records) - start) / 1e9
    return LlmMetrics(tuple(rows), sum(outputs) / seconds, len(records) / seconds)


def _streaming_rows(records: Sequence[Record], outputs: Sequence[int]) -> list[Metric]:
    """Return the time to the first token, and between tokens if an answer has several."""
    first_tokens = [(record.answered[0] - record.sent) / _MS for record in records]
    gaps = [
        (record.latency / _MS - first) / (count - 1)
        for record, first, count in zip(records, first_tokens, outputs, strict=True)
        if count > 1
    ]
    rows = [Metric("time_to_first_token", "ms", tuple(first_tokens))]
    if gaps:
        rows.append(Metric("inter_token_latency", "ms", tuple(gaps)))
    return rows


def _answer_text(record: Record, name: str) -> str:
    return "".join(_first_text(outputs, name) for outputs in record.outputs)


def _first_text(tensors: Mapping[str, Array], name: str) -> str:
    return first_text(tensors[name]) if name in tensors else ""
