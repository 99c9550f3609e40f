"""Make a table from samples: medians, ratios to each peer, and the share of the machine's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

OURS = "slipstream"


@dataclass(frozen=True)
class Row:
    title: str
    unit: str
    higher_is_better: bool
    figures: Mapping[str, float]  # contender → median
    limit: float | None  # best value that the machine allows

    def ratio(self, peer: str) -> float | None:
        """Return our figure divided by the peer's."""
        if OURS not in self.figures or not self.figures.get(peer):
            return None
        return self.figures[OURS] / self.figures[peer]

    @property
    def of_limit(self) -> float | None:
        """Return the share of the limit: 1 is the limit, less is worse, for times and rates."""
        if self.limit is None or not self.figures.get(OURS):
            return None
        share = self.figures[OURS] / self.limit
        return share if self.higher_is_better else 1 / share


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items() if values}


def render(rows: Sequence[Row], peers: Sequence[str]) -> str:
    header = [
        "case",
        "better",
        OURS,
        *peers,
        *(f"ours/{peer}" for peer in peers),
        "limit",
        "of limit",
    ]
    lines = [header]
    for row in rows:
        names = [OURS, *peers]
        lines.append(
            [
                f"{row.title}, {row.unit}",
                "higher" if row.higher_is_better else "lower",
                *(_figure(row.figures.get(name)) for name in names),
                *(_ratio(row.ratio(peer)) for peer in peers),
                _figure(row.limit),
                "-" if row.of_limit is None else f"{row.of_limit:.0%}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"
