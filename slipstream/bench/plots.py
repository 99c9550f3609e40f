"""What was measured, as one page: how latencies are spread, how they went over time, and what load
does to them.
"""

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
svg { width: 100%; height: auto; font-size: 11px }
svg text { fill: currentColor } .grid { stroke: #8884; stroke-width: 1 } .line { fill: none; stroke-width: 2 }
.wide { overflow-x: auto } tr th:first-child { white-space: nowrap }
table { border-collapse: collapse } th, td { padding: .2rem .8rem; text-align: right }
.legend span { margin-right: 1rem }
"""
_COLUMNS = ("avg", "p50", "p90", "p99")
_TITLES = {
    "time_to_first_token": "Time to the first token",
    "inter_token_latency": "Time between tokens",
    "request_latency": "Time of a whole request",
}


@dataclass(frozen=True)
class Run:
    """One load, and what came of it."""

    label: str
    load: float  # requests in flight, or a second
    records: Sequence[Record]
    metrics: LlmMetrics


def page(title: str, load_name: str, runs: Sequence[Run]) -> str:
    parts = [f"<h1>{escape(title)}</h1>", _table(runs)]
    for name, heading in _TITLES.items():
        spread = [
            Series(run.label, _spread(values)) for run in runs if (values := _values(run, name))
        ]
        if spread:
            parts += [
                f"<h2>{heading}</h2>",
                "<h3>Share of requests within a time</h3>",
                chart("ms", "% of requests", spread),
                "<h3>As the measurement went on</h3>",
                chart(
                    "seconds",
                    "ms",
                    [Series(run.label, _over_time(run, name), dots=True) for run in runs],
                ),
            ]
    if len(runs) > 1:
        parts += ["<h2>What load does</h2>", *_comparisons(load_name, runs)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(runs: Sequence[Run]) -> str:
    names = [name for name in _TITLES if any(name in run.metrics.by_name() for run in runs)]
    heads = "".join(f'<th colspan="{len(_COLUMNS)}">{_TITLES[name]}, ms</th>' for name in names)
    below = "".join(f"<th>{column}</th>" for _ in names for column in _COLUMNS)
    lines = []
    for run in runs:
        found = run.metrics.by_name()
        cells = [
            f"{found[name].statistics[column]:,.1f}" if name in found else ""
            for name in names
            for column in _COLUMNS
        ]
        cells += [
            f"{run.metrics.output_tokens_per_second:,.1f}",
            f"{run.metrics.requests_per_second:,.2f}",
        ]
        lines.append(
            f"<tr><th>{escape(run.label)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    return (
        f'<div class="wide"><table><tr><th></th>{heads}<th>tokens / s</th><th>requests / s</th></tr>'
        f"<tr><th></th>{below}<th></th><th></th></tr>{''.join(lines)}</table></div>"
    )


def _values(run: Run, name: str) -> tuple[float, ...]:
    found = run.metrics.by_name().get(name)
    return found.values if found else ()


def _spread(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    return [(value, 100.0 * (number + 1) / len(ordered)) for number, value in enumerate(ordered)]


def _over_time(run: Run, name: str) -> list[tuple[float, float]]:
    """By when each request was sent. Only answers of several tokens have a time between them."""
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
        "<h3>What throughput costs in latency</h3>",
    ]
    trade = []
    for column in ("p50", "p99"):
        latencies = [run.metrics.by_name()["request_latency"].statistics[column] for run in ordered]
        points = [(latency, rate) for latency, (_, rate) in zip(latencies, throughput, strict=True)]
        trade.append(
            Series(
                f"{column} of whole requests", points, notes=[f"{run.load:g}" for run in ordered]
            )
        )
    return [*parts, chart("ms", "tokens / s", trade)]
