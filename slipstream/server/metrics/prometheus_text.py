"""Metric families and their Prometheus text, spelled like Triton's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.server.metrics.statistics import Histogram
from slipstream.server.metrics.summaries import DEFAULT_QUANTILES, Summary

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A metric: its name, help text and samples. `kind`: counter, gauge, histogram or summary."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Labels, float]] = ()
    histograms: Sequence[tuple[Labels, Histogram]] = field(default_factory=list)
    summaries: Sequence[tuple[Labels, Summary]] = ()
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES

    def render(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        lines += [_line(self.name, labels, value) for labels, value in self.samples]
        for labels, histogram in self.histograms:
            lines += _histogram_lines(self.name, labels, histogram)
        for labels, summary in self.summaries:
            lines += _summary_lines(self.name, labels, summary, self.quantiles)
        return "\n".join(lines) + "\n"


def _histogram_lines(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    yield _line(f"{name}_count", labels, histogram.count)
    yield _line(f"{name}_sum", labels, histogram.sum)
    below = 0
    for bound, count in zip([*histogram.bounds, None], histogram.counts, strict=True):
        below += count
        le = "+Inf" if bound is None else f"{bound:g}"
        yield _text_line(f"{name}_bucket", labels, str(below), ("le", le))


def _summary_lines(
    name: str, labels: Labels, summary: Summary, quantiles: tuple[float, ...]
) -> Iterator[str]:
    yield _line(f"{name}_count", labels, summary.count)
    yield _line(f"{name}_sum", labels, summary.sum)
    for quantile, value in zip(quantiles, summary.quantiles(quantiles), strict=True):
        shown = "Nan" if value != value else f"{value:g}"  # the spelling of Triton's library
        yield _text_line(name, labels, shown, ("quantile", f"{quantile:g}"))


def _line(name: str, labels: Labels, value: float) -> str:
    # As Triton's library, write whole numbers without a fraction: scripts read them as integers.
    whole = isinstance(value, float) and value.is_integer()
    return _text_line(name, labels, str(int(value) if whole else value))


def _text_line(name: str, labels: Labels, value: str, *last: tuple[str, str]) -> str:
    """Return the line of one sample. Labels are sorted, except those in `last`."""
    pairs = (*sorted(labels.items()), *last)
    written = ",".join(f'{key}="{_escape(text)}"' for key, text in pairs)
    return f"{name}{{{written}}} {value}" if written else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
