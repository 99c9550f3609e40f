"""Tables of measurements in a terminal. No number is cut: a narrow terminal gets fewer columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from slipstream.bench.llm_metrics import LlmMetrics, Metric

_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "p50")
_NARROW_COLUMNS = ("avg", "min", "max", "p99", "p90", "p50")
_NOT_SHOWN = "output_token_throughput_per_request"
_WIDTH = 120  # width of the table if the output is no terminal
_NARROW = 112  # terminals below this get the narrow form
_SHORT_TITLES = {
    "time_to_first_token": "First token",
    "inter_token_latency": "Between tokens",
    "request_latency": "Request",
}
_LOAD_COLUMNS = ("p50", "p99")
_THROUGHPUTS = {
    "output_token_throughput": "Output tokens/s",
    "request_throughput": "Requests/s",
}
_COMPARED = ("avg", "p50", "p99")


class ReportError(ValueError):
    """A file that is not a report of a measurement."""


class LoadRow(NamedTuple):
    """A level of load, and the measurements at it."""

    load: float
    metrics: LlmMetrics


def print_metrics(metrics: LlmMetrics, console: Console | None = None) -> None:
    """Print the metrics of one level of load, as genai-perf does."""
    console = console or create_console()
    narrow = console.width < _NARROW
    columns = _NARROW_COLUMNS if narrow else _COLUMNS
    table = _create_table("LLM Metrics", narrow)
    table.add_column("Statistic", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in metrics.rows:
        if row.name != _NOT_SHOWN:
            values = [row.statistics[column] for column in columns]
            table.add_row(_title(row), *(compact(one) if narrow else full(one) for one in values))
    console.print(table)
    console.print(f"Output token throughput (per sec): {full(metrics.output_tokens_per_second)}")
    console.print(f"Request throughput (per sec): {full(metrics.requests_per_second)}")


def print_loads(unit: str, rows: Sequence[LoadRow], console: Console | None = None) -> None:
    """Print several levels of load, one in each line. `unit`: that of the loads."""
    console = console or create_console()
    table = _create_table(f"Latencies in ms, by {unit}", narrow=True)
    table.add_column("Load", justify="right", vertical="bottom", no_wrap=True)
    measured = {metric.name for row in rows for metric in row.metrics.rows}
    names = [name for name in _SHORT_TITLES if name in measured]
    for name in names:
        for column in _LOAD_COLUMNS:
            heading = "\n".join([*_SHORT_TITLES[name].split(), column])
            table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for heading in ("Tokens\n/s", "Requests\n/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for load, metrics in rows:
        throughputs = (metrics.output_tokens_per_second, metrics.requests_per_second)
        table.add_row(f"{load:g}", *_latency_cells(metrics, names), *map(compact, throughputs))
    console.print(table)


def _latency_cells(metrics: LlmMetrics, names: Sequence[str]) -> Iterator[str]:
    found = metrics.by_name()
    for name in names:
        statistics = found[name].statistics if name in found else {}
        yield from (_cell(statistics.get(column)) for column in _LOAD_COLUMNS)


def print_comparison(files: Sequence[Path], console: Console | None = None) -> None:
    """Print the reports of several measurements side by side, with the change from the first."""
    console = console or create_console()
    reports = [read_report(file) for file in files]
    for number, file in enumerate(files):
        console.print(f"{_letter(number)}: {file}", markup=False, highlight=False)
    table = _create_table("Comparison", narrow=True)
    table.add_column("Statistic", no_wrap=True)
    for number in range(len(files)):
        table.add_column(_letter(number), justify="right", no_wrap=True)
        if number:
            table.add_column("change", justify="right", no_wrap=True)
    for title, name, column in _compared_rows(reports):
        values = [report.get(name, {}).get(column) for report in reports]
        cells = [_cell(values[0])]
        for value in values[1:]:
            cells += [_cell(value), change(values[0], value)]
        table.add_row(title, *cells)
    console.print(table)


def create_console() -> Console:
    """Return the terminal, or a wide one for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False)


def read_report(file: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of a report by name. Raises ReportError for another file."""
    try:
        document = json.loads(file.read_text("utf-8"))
        found = {
            name: value
            for name, value in document.items()
            if isinstance(value, dict) and "unit" in value and "avg" in value
        }
    except (ValueError, AttributeError) as error:
        raise ReportError(f"{file}: not JSON that bench wrote") from error
    if "request_latency" not in found:
        raise ReportError(
            f"{file}: no report of a measurement; give profile_export_genai_perf.json of bench"
        )
    return found


def _compared_rows(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return title, metric and statistic of the lines that some report has."""
    rows = [
        (f"{title} {column} (ms)", name, column)
        for name, title in _SHORT_TITLES.items()
        for column in _COMPARED
    ]
    rows += [(title, name, "avg") for name, title in _THROUGHPUTS.items()]
    measured = {name for report in reports for name in report}
    return [row for row in rows if row[1] in measured]


def _cell(value: float | None) -> str:
    return "" if value is None else compact(value)


def change(before: float | None, after: float | None) -> str:
    """Return the difference in percent of the first value."""
    if not before or after is None:
        return ""
    return f"{(after / before - 1) * 100:+.1f} %"


def full(value: float) -> str:
    return f"{value:,.2f}"


def compact(value: float) -> str:
    """Return a number in at most seven characters."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _create_table(title: str, narrow: bool) -> Table:
    if narrow:
        return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    return Table(title=title)


def _title(row: Metric) -> str:
    name = row.name.replace("_", " ").capitalize()
    return f"{name} (ms)" if row.unit == "ms" else name


def _letter(number: int) -> str:
    return chr(ord("A") + number)
