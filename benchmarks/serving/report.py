"""The table, the JSON file and the page of plots of `online.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from serving.cells import Cell, Figures, Spread
from serving.clients import OWN
from serving.published import NOTE
from serving.servers import OURS
from slipstream.bench.chart import Series, chart
from slipstream.bench.plots import document

OFFLINE = "offline"
_COLUMNS = ("mean", "p50", "p99")
_WIDTHS = (17, 12, 10, 8, 6, *(6,) * 6)
_NAMES = ("load", "server", "client", "tok/s", "ours÷", *("mean", "p50", "p99") * 2)


def header() -> str:
    """Return the head of the table. `ours÷` is our throughput divided by the row's."""
    above = " " * (sum(_WIDTHS[:5]) + 5)
    above += f"{'TTFT, ms':^21}{'inter-token, ms':^20}".rstrip()
    return f"{above}\n{_line(_NAMES)}"


def row(figures: Figures, ours: Figures | None) -> str:
    """Return a line of the table. `ours`: our figures of the same load and client."""
    ratio = ""
    if ours is not None and ours is not figures and figures.tokens_per_second:
        ratio = f"{ours.tokens_per_second / figures.tokens_per_second:.2f}"
    cells = [figures.cell.load, figures.server, figures.client]
    cells += [_number(figures.tokens_per_second), ratio]
    cells += [*_spread(figures.ttft), *_spread(figures.itl)]
    text = _line(cells)
    if figures.errors:
        text += f"\n  {len(figures.errors)} errors; the first: {figures.errors[0][:70]}"
    return text


def _line(cells: Sequence[str]) -> str:
    first = [cell[:width].ljust(width) for cell, width in zip(cells[:3], _WIDTHS, strict=False)]
    rest = [cell.rjust(width) for cell, width in zip(cells[3:], _WIDTHS[3:], strict=True)]
    return " ".join([*first, *rest])


def _spread(spread: Spread | None) -> list[str]:
    values = [getattr(spread, name) for name in _COLUMNS] if spread else [math.nan] * 3
    return [_number(value) for value in values]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cpu_row(figures: Figures) -> str:
    """Return the CPU seconds per 1,000 tokens of each kind of process, and its busiest thread."""
    tokens = figures.tokens_per_second * figures.seconds
    if not figures.cpu or not tokens:
        return ""
    parts = []
    for one in figures.cpu:
        count = f"{one.processes} × " if one.processes > 1 else ""
        per = 1000 * one.seconds / tokens
        parts.append(f"{count}{one.name} {per:.3f} ({one.busiest_thread:.0%})")
    return f"  CPU s/1,000 tokens (busiest thread): {', '.join(parts)}"


def find_ours(figures: Figures, results: Sequence[Figures]) -> Figures | None:
    """Return our figures of the same load, by the same client if it measured ours, too."""
    same = [one for one in results if one.server == OURS and one.cell == figures.cell]
    by_client = [one for one in same if one.client == figures.client]
    own = [one for one in same if one.client == OWN]
    return next(iter([*by_client, *own, *same]), None)


def table(results: Sequence[Figures]) -> str:
    return "\n".join([header(), *(row(one, find_ours(one, results)) for one in results)])


def notes(results: Sequence[Figures]) -> list[str]:
    found = ["ours÷: our tok/s divided by the row's. ITL: time between events with text."]
    if any(one.note == NOTE for one in results):
        found.append("vllm*: not measured in this run (vLLM 0.26.0, one H200, 2026-11-16).")
    return found


def page(title: str, settings: Mapping[str, object], results: Sequence[Figures]) -> str:
    """Return an HTML page: the settings, the table, and a chart of each figure over the load."""
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in settings.items()
    )
    parts = [f"<h1>{escape(title)}</h1>", f"<table>{facts}</table>"]
    parts.append(f"<pre>{escape(table(results))}\n\n{escape(chr(10).join(notes(results)))}</pre>")
    for by_rate in (False, True):
        chosen = [one for one in results if bool(one.cell.rate) == by_rate]
        if chosen:
            parts += _charts("requests / s" if by_rate else "requests in flight", chosen)
    return document(title, parts)


_Pick = Callable[[Figures], float | None]
_CHARTS: tuple[tuple[str, str, _Pick], ...] = (
    ("Throughput", "tokens / s", lambda one: one.tokens_per_second),
    ("Time to first token, p50", "ms", lambda one: one.ttft.p50 if one.ttft else None),
    ("Time to first token, p99", "ms", lambda one: one.ttft.p99 if one.ttft else None),
    ("Time between tokens, mean", "ms", lambda one: one.itl.mean if one.itl else None),
    ("Time between tokens, p99", "ms", lambda one: one.itl.p99 if one.itl else None),
)


def _charts(across: str, results: Sequence[Figures]) -> list[str]:
    parts = [f"<h2>By {across}</h2>"]
    for heading, up, pick in _CHARTS:
        parts += [f"<h3>{heading}</h3>", chart(across, up, _series(results, pick))]
    trade = [
        Series(label, sorted((one.itl.p99, one.tokens_per_second) for one in some if one.itl))
        for label, some in _groups(results).items()
    ]
    parts.append("<h3>Throughput against the time between tokens, p99</h3>")
    parts.append(chart("ms", "tokens / s", [one for one in trade if one.points]))
    return parts


def _series(results: Sequence[Figures], pick: _Pick) -> list[Series]:
    found = []
    for label, some in _groups(results).items():
        points = [(_level(one.cell), value) for one in some if (value := pick(one)) is not None]
        found.append(Series(label, sorted(points)))
    return [one for one in found if one.points]


def _level(cell: Cell) -> float:
    return cell.rate or float(cell.concurrency)


def _groups(results: Sequence[Figures]) -> dict[str, list[Figures]]:
    """Return the results by server, client, API and sampling: one line of a chart each."""
    groups: dict[str, list[Figures]] = {}
    for one in results:
        kind = one.cell.load.partition(" ")[2]
        client = "" if one.client in ("", OWN) else f" by {one.client}"
        label = " ".join(part for part in (f"{one.server}{client}", kind) if part)
        groups.setdefault(label, []).append(one)
    return groups
