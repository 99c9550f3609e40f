"""A chart as SVG: lines or dots over two axes, with a legend. Nothing but text, so that a page
needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 16, 48
_COLOURS = ("#2266aa", "#cc5533", "#338855", "#8844aa", "#997700", "#337788", "#aa3377", "#666666")
_TICKS = 5
_MOST_POINTS = 1000  # of a series: more would be drawn on top of each other


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False  # otherwise a line through the points
    notes: Sequence[str] = ()  # beside each point


@dataclass(frozen=True)
class Axis:
    """From a value to a place between `begin` and `end`; it starts at 0."""

    high: float
    step: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        most = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
        power = 10.0 ** math.floor(math.log10(most / _TICKS))
        step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times * _TICKS >= most)
        return cls(step * math.ceil(most / step), step, begin, end)

    def place(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * value / self.high

    def ticks(self) -> list[float]:
        return [self.step * number for number in range(round(self.high / self.step) + 1)]


def chart(across: str, up: str, series: Sequence[Series]) -> str:
    points = [point for one in series for point in one.points]
    x = Axis.over([point[0] for point in points], _LEFT, _WIDTH - _RIGHT)
    y = Axis.over([point[1] for point in points], _HEIGHT - _BOTTOM, _TOP)
    drawn = [
        _series(one, x, y, _COLOURS[number % len(_COLOURS)]) for number, one in enumerate(series)
    ]
    label = escape(f"{up} over {across}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{_frame(x, y, across, up)}{''.join(drawn)}</svg>{_legend(series)}"
    )


def _frame(x: Axis, y: Axis, across: str, up: str) -> str:
    lines = [
        f'<path class="grid" d="M{_LEFT} {y.place(tick):.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 6}" y="{y.place(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in y.ticks()
    ]
    lines += [
        f'<text x="{x.place(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        for tick in x.ticks()
    ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{escape(across)}</text>"
    )
    lines.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'
    )
    return "".join(lines)


def _series(series: Series, x: Axis, y: Axis, colour: str) -> str:
    every = max(1, -(-len(series.points) // _MOST_POINTS))
    kept = [
        *series.points[::every],
        *(series.points[-1:] if (len(series.points) - 1) % every else []),
    ]
    places = [
        (x.place(across), y.place(up))
        for across, up in kept
        if math.isfinite(across) and math.isfinite(up)
    ]
    notes = [
        f'<text x="{left + 6:.1f}" y="{top - 6:.1f}">{escape(note)}</text>'
        for (left, top), note in zip(places, series.notes, strict=False)
    ]
    if series.dots:
        marks = [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{colour}"/>'
            for left, top in places
        ]
        return "".join([*marks, *notes])
    path = "L".join(f"{left:.1f} {top:.1f}" for left, top in places)
    return f'<path class="line" stroke="{colour}" d="M{path}"/>' + "".join(notes) if places else ""


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = [
        f'<span style="color:{_COLOURS[number % len(_COLOURS)]}">&#9632; {escape(one.label)}</span>'
        for number, one in enumerate(series)
    ]
    return f'<p class="legend">{" ".join(items)}</p>'
