"""genai-perf's files: inputs, times of every request, and metrics as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.bench.llm_metrics import LlmMetrics
from slipstream.bench.load import Measured, Record
from slipstream.client.tensors import Array, text_list

_CSV_COLUMNS = ("avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "p25")
_NOT_SHOWN = "output_token_throughput_per_request"


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


def profile_export(
    measured: Measured, mode: str, value: float, service_kind: str = "triton", endpoint: str = ""
) -> str:
    """Return perf_analyzer's file: data and times of every request and its answers."""
    experiment = {
        "experiment": {"mode": mode, "value": value},
        "requests": [_request_document(record) for record in measured.records],
        "window_boundaries": measured.boundaries,
    }
    document = {
        "experiments": [experiment],
        "version": "2.0",
        "service_kind": service_kind,
        "endpoint": endpoint,
    }
    return json.dumps(document)


def _request_document(record: Record) -> dict[str, Any]:
    return {
        "timestamp": record.sent,
        "request_inputs": _tensors_document(record.request.inputs),
        "response_timestamps": list(record.answered),
        "response_outputs": [_tensors_document(outputs) for outputs in record.outputs],
    }


def _tensors_document(tensors: Mapping[str, Array]) -> dict[str, Any]:
    return {name: _plain(array) for name, array in tensors.items()}


def _plain(array: Array) -> Any:
    items: list[Any] = text_list(array) if array.dtype == object else array.reshape(-1).tolist()
    return items[0] if len(items) == 1 else items


def inputs_document(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the fields of every request as JSON."""
    return json.dumps({"data": [_row_document(row) for row in rows]}, indent=2)


def _row_document(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name == "model" else [value] for name, value in row.items()}
