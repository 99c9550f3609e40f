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
    # our figure divided by that of the first peer: at least this if higher is better, else at most
    goal: float | None = None

    def ratio(self, peer: str) -> float | None:
        """Return our figure divided by the peer's."""
        if OURS not in self.figures or not self.figures.get(peer):
            return None
        return self.figures[OURS] / self.figures[peer]

    def met(self, peer: str) -> bool | None:
        """Return whether the goal is met; None without a goal or without figures."""
        ratio = self.ratio(peer)
        if self.goal is None or ratio is None:
            return None
        return ratio >= self.goal if self.higher_is_better else ratio <= self.goal

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
    with_goals = bool(peers) and any(row.goal is not None for row in rows)
    header = [
        "case",
        "better",
        OURS,
        *peers,
        *(f"ours/{peer}" for peer in peers),
        *(["goal"] if with_goals else []),
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
                *([_goal(row, peers[0])] if with_goals else []),
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


def _goal(row: Row, peer: str) -> str:
    if row.goal is None:
        return "-"
    sign = "≥" if row.higher_is_better else "≤"
    verdict = {True: " met", False: " missed", None: ""}[row.met(peer)]
    return f"{sign} {row.goal:g}×{verdict}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"
