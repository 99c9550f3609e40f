"""genai-perf's table and its files: the inputs, every request's times, and the metrics as JSON and
CSV.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table

from slipstream.bench.llm_metrics import LlmMetrics, Metric
from slipstream.bench.load import Measured, Record
from slipstream.client.tensors import Array

_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75")
_CSV_COLUMNS = ("avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "p25")
_NOT_SHOWN = "output_token_throughput_per_request"
_WIDTH = 110  # of the table where there is no terminal to ask


def print_table(metrics: LlmMetrics) -> None:
    table = Table(title="LLM Metrics")
    table.add_column("Statistic", justify="right", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in metrics.rows:
        if row.name != _NOT_SHOWN:
            table.add_row(_title(row), *(f"{row.statistics[column]:,.2f}" for column in _COLUMNS))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    print(f"Output token throughput (per sec): {metrics.output_tokens_per_second:,.2f}")
    print(f"Request throughput (per sec): {metrics.requests_per_second:,.2f}", flush=True)


def _title(row: Metric) -> str:
    name = row.name.replace("_", " ").capitalize()
    return f"{name} (ms)" if row.unit == "ms" else name


def json_report(metrics: LlmMetrics, given: Mapping[str, Any]) -> str:
    document: dict[str, Any] = {
        "request_throughput": {"unit": "requests/sec", "avg": metrics.requests_per_second},
        "output_token_throughput": {"unit": "tokens/sec", "avg": metrics.output_tokens_per_second},
    }
    document |= {row.name: {"unit": row.unit, **row.statistics} for row in metrics.rows}
    return json.dumps({**document, "input_config": given}, indent=2, default=str)


def csv_report(metrics: LlmMetrics) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["Metric", *_CSV_COLUMNS])
    for row in metrics.rows:
        if row.name != _NOT_SHOWN:
            title = row.name.replace("_", " ").title() + (" (ms)" if row.unit == "ms" else "")
            writer.writerow([title, *(f"{row.statistics[column]:,.2f}" for column in _CSV_COLUMNS)])
    writer.writerow([])
    writer.writerow(["Metric", "Value"])
    writer.writerow(
        ["Output Token Throughput (per sec)", f"{metrics.output_tokens_per_second:,.2f}"]
    )
    writer.writerow(["Request Throughput (per sec)", f"{metrics.requests_per_second:,.2f}"])
    return text.getvalue()


def profile_export(measured: Measured, mode: str, value: float) -> str:
    """perf_analyzer's file: what was sent and what came when, request by request."""
    experiment = {
        "experiment": {"mode": mode, "value": value},
        "requests": [_request_document(record) for record in measured.records],
        "window_boundaries": measured.boundaries,
    }
    return json.dumps(
        {"experiments": [experiment], "version": "2.0", "service_kind": "triton", "endpoint": ""}
    )


def _request_document(record: Record) -> dict[str, Any]:
    return {
        "timestamp": record.sent,
        "request_inputs": {name: _plain(array) for name, array in record.request.inputs.items()},
        "response_timestamps": list(record.answered),
        "response_outputs": [
            {name: _plain(array) for name, array in outputs.items()} for outputs in record.outputs
        ],
    }


def _plain(array: Array) -> Any:
    if array.dtype == object:
        items = [bytes(item).decode(errors="replace") for item in array.reshape(-1)]
    else:
        items = numpy.asarray(array).reshape(-1).tolist()
    return items[0] if len(items) == 1 else items


def inputs_document(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(
        {
            "data": [
                {name: value if name == "model" else [value] for name, value in row.items()}
                for row in rows
            ]
        },
        indent=2,
    )
