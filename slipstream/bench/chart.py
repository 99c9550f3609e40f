"""SVG charts: lines or dots over two axes, with a legend. A page needs no script for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 640
_HEIGHT = 320
_LEFT = 72  # margins
_RIGHT = 16
_TOP = 16
_BOTTOM = 48
_COLOURS = ("#2266aa", "#cc5533", "#338855", "#8844aa", "#997700", "#337788", "#aa3377", "#666666")
_TICKS = 5
_MAX_POINTS = 1000  # points per series; more would overlap
_HOVER_POINTS = 100  # points of a line that show their values


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False  # otherwise a line connects the points
    notes: Sequence[str] = ()  # labels of the points


@dataclass(frozen=True)
class Axis:
    """A linear scale from 0 to `high`, drawn between the coordinates `begin` and `end`."""

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

    def position(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * value / self.high

    def ticks(self) -> list[float]:
        return [self.step * number for number in range(round(self.high / self.step) + 1)]


def chart(across: str, up: str, series: Sequence[Series]) -> str:
    """Return a chart. `across` and `up` name the axes."""
    points = list(itertools.chain.from_iterable(one.points for one in series))
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
        f'<path class="grid" d="M{_LEFT} {y.position(tick):.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 6}" y="{y.position(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in y.ticks()
    ]
    lines += [
        f'<text x="{x.position(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
        f"{tick:g}</text>"
        for tick in x.ticks()
    ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{escape(across)}</text>"
    )
    lines.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(up)}</text>"
    )
    return "".join(lines)


def _series(series: Series, x: Axis, y: Axis, colour: str) -> str:
    every = max(1, -(-len(series.points) // _MAX_POINTS))
    kept = list(series.points[::every])
    if (len(series.points) - 1) % every:
        kept += series.points[-1:]
    finite = [(across, up) for across, up in kept if math.isfinite(across) and math.isfinite(up)]
    places = [(x.position(across), y.position(up)) for across, up in finite]
    notes = [
        f'<text x="{left + 6:.1f}" y="{top - 6:.1f}">{escape(note)}</text>'
        for (left, top), note in zip(places, series.notes, strict=False)
    ]
    values = [f"{series.label}: {up:,.4g} at {across:,.4g}" for across, up in finite]
    if series.dots:
        marks = [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{colour}">'
            f"<title>{escape(value)}</title></circle>"
            for (left, top), value in zip(places, values, strict=True)
        ]
        return "".join([*marks, *notes])
    if not places:
        return ""
    path = "L".join(f"{left:.1f} {top:.1f}" for left, top in places)
    line = f'<path class="line" stroke="{colour}" d="M{path}"/>'
    return "".join([line, *_hover_points(places, values), *notes])


def _hover_points(places: Sequence[tuple[float, float]], values: Sequence[str]) -> Iterator[str]:
    """Return points that show their values to a pointer, evenly over a line."""
    every = max(1, -(-len(places) // _HOVER_POINTS))
    for (left, top), value in list(zip(places, values, strict=True))[::every]:
        yield (
            f'<circle class="value" cx="{left:.1f}" cy="{top:.1f}" r="4">'
            f"<title>{escape(value)}</title></circle>"
        )


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = [
        f'<span style="color:{_COLOURS[number % len(_COLOURS)]}">&#9632; {escape(one.label)}</span>'
        for number, one in enumerate(series)
    ]
    return f'<p class="legend">{" ".join(items)}</p>'
