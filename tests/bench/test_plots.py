"""The HTML page of measurements: it holds every run and loads nothing from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy
import pytest

from slipstream.bench.chart import Axis, Series, chart
from slipstream.bench.llm_metrics import llm_metrics
from slipstream.bench.load import Record
from slipstream.bench.plots import Run, page
from slipstream.client.connection import Request

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def create_run(load: int, streaming: bool = True) -> Run:
    text = {"text_input": numpy.array([[b"a b"]], dtype=object)}
    records = []
    for number in range(6):
        sent = number * 10**9
        tokens = 1 if number == 0 else 4  # one token has no inter-token latency
        times = tuple(sent + (step + 1) * load * 10**7 for step in range(tokens))
        outputs = tuple({"text_output": numpy.array([[b"x "]], dtype=object)} for _ in times)
        records.append(Record(Request("m", text), sent, times, outputs))
    metrics = llm_metrics(
        records, lambda words: len(words.split()), streaming, ("text_input", "text_output")
    )
    return Run(f"{load} in flight", load, records, metrics)


def points(svg: str) -> list[list[tuple[float, float]]]:
    """Return the coordinates of the lines of a chart."""
    paths = [
        path.attrib["d"] for path in ElementTree.fromstring(svg) if path.get("class") == "line"
    ]
    return [[tuple(map(float, place.split())) for place in path[1:].split("L")] for path in paths]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("most", "high", "step"),
    [
        (1.0, 1.0, 0.2),
        (97.0, 100.0, 20.0),
        (101.0, 125.0, 25.0),
        (0.03, 0.03, 0.01),
        (0.0, 1.0, 0.2),
        (5000.0, 5000.0, 1000.0),
    ],
)
def test_an_axis_has_round_ticks_and_covers_all_values(most, high, step):
    axis = Axis.over([0.0, most, float("nan")], 100.0, 300.0)
    assert (axis.high, axis.step) == (pytest.approx(high), pytest.approx(step))
    assert (axis.position(0.0), axis.position(axis.high)) == (100.0, 300.0)
    assert axis.ticks()[-1] == pytest.approx(high)


def test_chart_points_are_proportional_to_their_values():
    svg = SVG.findall(chart("s", "ms", [Series("a", [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)])]))[0]
    (line,) = points(svg)
    assert line[1] == pytest.approx(
        ((line[0][0] + line[2][0]) / 2, (line[0][1] + line[2][1]) / 2), abs=0.1
    )
    assert line[0][1] > line[2][1], "larger values are higher"


def test_long_series_are_thinned_and_keep_the_last_point():
    svg = SVG.findall(
        chart("s", "ms", [Series("a", [(float(n), 1.0 + n % 2) for n in range(10_001)])])
    )[0]
    (line,) = points(svg)
    assert 500 < len(line) <= 1001
    assert line[-1][0] == pytest.approx(640 - 16, abs=20)
    few, many = ([(float(n), 1.0) for n in numbers] for numbers in ((0, 1001), range(1002)))
    ends = [
        points(SVG.findall(chart("s", "ms", [Series("a", given)]))[0])[0][-1]
        for given in (few, many)
    ]
    assert ends[0] == ends[1]


def test_a_page_of_one_run_has_no_comparison():
    text = page("m at x", "requests in flight", [create_run(1)])
    assert text.count("<svg") == 6  # three latencies, each with its distribution and course
    assert "Effect of load" not in text
    assert page("m", "requests in flight", [create_run(1, streaming=False)]).count("<svg") == 2


def test_a_page_of_several_runs_compares_them():
    text = page("<m> & co", "requests in flight", [create_run(4), create_run(1)])
    assert text.count("<svg") == 8
    assert "<h1>&lt;m&gt; &amp; co</h1>" in text
    throughput = points(SVG.findall(text)[-2])[0]
    assert throughput[0][0] < throughput[1][0], "the runs are sorted by load"
    assert throughput[0][1] < throughput[1][1], "four times the load took four times as long here"
    assert "<td>40.0</td>" in text  # the first token of the slower run, in milliseconds
    assert not re.search(r"https?://|<script|src=|@import|url\(", text), "the page loads something"


def test_a_page_says_how_it_was_measured_and_shows_values_to_a_pointer():
    runs = [create_run(1), create_run(4)]
    text = page("m", "requests in flight", runs, [("Date", "<today>")])
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert facts == {
        "Date": "&lt;today&gt;",
        "Tokens of a prompt": "2 on average, 2 to 2",
        "Tokens of an answer": "4 on average, 1 to 4",
        "Requests": "12",
    }
    titles = re.findall(r"<title>(.*?)</title></circle>", text)
    assert "4 in flight: 40 at 0" in titles
    assert len(titles) > 30


def test_a_long_line_shows_some_of_its_values():
    svg = chart("s", "ms", [Series("a", [(float(n), 1.0) for n in range(5000)])])
    assert 50 <= svg.count("<title>") <= 100
