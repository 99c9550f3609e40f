"""An HTML page of measurements: distribution of latencies, course over time, effect of load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipstream.bench.chart import Series, chart
from slipstream.bench.llm_metrics import LlmMetrics
from slipstream.bench.load import Record

_STYLE = """
:root { color-scheme: light dark; font: 15px system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }
dt { font-weight: 600 } dd { margin: 0 }
.full { width: calc(100vw - 3rem); margin-left: calc(50% - 50vw + 1.5rem); display: flex }
.full .wide { margin: auto }
circle.value { fill: transparent } circle.value:hover { fill: currentColor }
svg { width: 100%; height: auto; font-size: 11px }
svg text { fill: currentColor }
.grid { stroke: #8884; stroke-width: 1 }
.line { fill: none; stroke-width: 2 }
.wide { overflow-x: auto } tr th:first-child { white-space: nowrap }
table { border-collapse: collapse } th, td { padding: .2rem .8rem; text-align: right }
.legend span { margin-right: 1rem }
"""
_COLUMNS = ("avg", "p50", "p90", "p99")
_TITLES = {
    "time_to_first_token": "Time to first token",
    "inter_token_latency": "Inter-token latency",
    "request_latency": "Request latency",
}


_LENGTHS = {
    "input_sequence_length": "Tokens of a prompt",
    "output_sequence_length": "Tokens of an answer",
}


@dataclass(frozen=True)
class Run:
    """The measurement of one level of load."""

    label: str
    load: float  # requests in flight, or requests a second
    records: Sequence[Record]
    metrics: LlmMetrics


def page(
    title: str, load_name: str, runs: Sequence[Run], facts: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the page. `load_name` is the unit of the loads. `facts`: names and texts of how it was
    measured.
    """
    parts = [f"<h1>{escape(title)}</h1>", _fact_list([*facts, *_lengths(runs)]), _table(runs)]
    for name, heading in _TITLES.items():
        measured = [run for run in runs if _values(run, name)]
        if not measured:
            continue
        spread = [Series(run.label, _distribution(_values(run, name))) for run in measured]
        course = [Series(run.label, _over_time(run, name), dots=True) for run in runs]
        parts += [
            f"<h2>{heading}</h2>",
            "<h3>Distribution</h3>",
            chart("ms", "% of requests", spread),
            "<h3>Over time</h3>",
            chart("seconds", "ms", course),
        ]
    if len(runs) > 1:
        parts += ["<h2>Effect of load</h2>", *_comparisons(load_name, runs)]
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """Return an HTML page that contains the parts."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _fact_list(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{items}</dl>"


def _lengths(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the measured lengths of prompts and answers, and the number of requests."""
    facts = []
    for name, title in _LENGTHS.items():
        values = [value for run in runs for value in _values(run, name)]
        if values:
            mean = sum(values) / len(values)
            facts.append(
                (title, f"{mean:,.0f} on average, {min(values):,.0f} to {max(values):,.0f}")
            )
    return [*facts, ("Requests", f"{sum(len(run.records) for run in runs):,}")]


def _table(runs: Sequence[Run]) -> str:
    names = [name for name in _TITLES if _is_measured(name, runs)]
    heads = "".join(f'<th colspan="{len(_COLUMNS)}">{_TITLES[name]}, ms</th>' for name in names)
    below = "".join(f"<th>{column}</th>" for column in _COLUMNS) * len(names)
    lines = "".join(_table_row(run, names) for run in runs)
    return (
        f'<div class="full"><div class="wide"><table><tr><th></th>{heads}'
        f"<th>tokens / s</th><th>requests / s</th></tr>"
        f"<tr><th></th>{below}<th></th><th></th></tr>{lines}</table></div></div>"
    )


def _is_measured(name: str, runs: Sequence[Run]) -> bool:
    return any(name in run.metrics.by_name() for run in runs)


def _table_row(run: Run, names: Sequence[str]) -> str:
    found = run.metrics.by_name()
    cells: list[str] = []
    for name in names:
        statistics = found[name].statistics if name in found else None
        cells += [f"{statistics[column]:,.1f}" if statistics else "" for column in _COLUMNS]
    cells.append(f"{run.metrics.output_tokens_per_second:,.1f}")
    cells.append(f"{run.metrics.requests_per_second:,.2f}")
    return f"<tr><th>{escape(run.label)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _values(run: Run, name: str) -> tuple[float, ...]:
    found = run.metrics.by_name().get(name)
    return found.values if found else ()


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    return [(value, 100.0 * (number + 1) / len(ordered)) for number, value in enumerate(ordered)]


def _over_time(run: Run, name: str) -> list[tuple[float, float]]:
    """Return the values by the time at which each request was sent.

    Only answers of several tokens have an inter-token latency.
    """
    records = list(run.records)
    if name == "inter_token_latency":
        counts = _values(run, "output_sequence_length")
        records = [record for record, count in zip(records, counts, strict=True) if count > 1]
    begin = min(record.sent for record in run.records)
    values = zip(records, _values(run, name), strict=True)
    return sorted(((record.sent - begin) / 1e9, value) for record, value in values)


def _comparisons(load_name: str, runs: Sequence[Run]) -> list[str]:
    ordered = sorted(runs, key=lambda run: run.load)
    throughput = [(run.load, run.metrics.output_tokens_per_second) for run in ordered]
    parts = [
        "<h3>Throughput</h3>",
        chart(load_name, "tokens / s", [Series("all requests", throughput)]),
        "<h3>Throughput against latency</h3>",
    ]
    trade = []
    for column in ("p50", "p99"):
        latencies = [run.metrics.by_name()["request_latency"].statistics[column] for run in ordered]
        points = [(latency, rate) for latency, (_, rate) in zip(latencies, throughput, strict=True)]
        trade.append(
            Series(
                f"{column} of request latency", points, notes=[f"{run.load:g}" for run in ordered]
            )
        )
    return [*parts, chart("ms", "tokens / s", trade)]
