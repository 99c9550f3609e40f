"""benchmarks/online.py at its smallest: it starts a server and an engine. Nothing is timed."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LOADS = {"1", "1 gen_stream", "1 gRPC", "2 sampled", "20/s"}


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """Return the finished command and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("online")
    command = [sys.executable, str(BENCHMARKS / "online.py"), "--small", "--clients", "none"]
    command += ["--servers", "slipstream", "--concurrency", "1", "--sampled", "2"]
    command += ["--profile", "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False), folder


def test_every_load_is_complete_over_every_api(smallest):
    result, folder = smallest
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((folder / "online.json").read_text())["results"]
    online = {one["cell"]["api"]: one for one in results if one["server"] == "slipstream"}
    assert set(online) == {"completions", "generate_stream", "grpc"}
    served = [one for one in results if one["server"] == "slipstream"]
    assert [one["errors"] for one in served] == [[]] * len(LOADS)
    assert [one["completed"] for one in served] == [one["cell"]["requests"] for one in served]
    for one in served:
        counted = one["tokens_per_second"] * one["seconds"]
        assert counted == pytest.approx(one["completed"] * one["cell"]["output_tokens"])
        assert {process["name"] for process in one["cpu"]} >= {"server", "engine", "client"}


def test_the_table_has_a_line_for_each_load_and_the_offline_engine(smallest):
    lines = smallest[0].stdout.splitlines()
    head = next(line for line in lines if line.startswith("load"))
    assert head.split() == [
        *("load", "server", "client", "tok/s", "ours÷"),
        *("mean", "p50", "p99", "mean", "p50", "p99"),
    ]
    assert {line[:17].strip() for line in lines if " slipstream " in line[17:30]} == LOADS
    offline = [line for line in lines if " offline " in line[17:30]]
    assert {line[:17].strip() for line in offline} == {"1", "2 sampled"}
    assert max(len(line) for line in lines if not line.startswith("written")) <= 110


def test_greedy_tokens_over_both_protocols_equal_the_offline_engines(smallest):
    settings = json.loads((smallest[1] / "online.json").read_text())["settings"]
    expected = "8 of 8 answers equal"
    assert settings["tokens as offline"] == {"HTTP": expected, "gRPC": expected}


def test_the_page_has_a_chart_of_every_figure(smallest):
    page = (smallest[1] / "online.html").read_text()
    assert page.count("<svg") == 2 * 6  # by requests in flight, and by requests a second
    for label in ("slipstream", "slipstream gRPC", "slipstream sampled", "offline"):
        assert f"&#9632; {label}</span>" in page


@pytest.fixture(scope="module")
def cells():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / "serving" / "cells.py"))
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_figures_come_from_the_times_of_events(cells):
    millisecond = 1_000_000
    cell = cells["Cell"](2, 2, 4, 3)
    first = cells["Answer"](0, 10 * millisecond, 30 * millisecond, [5 * millisecond] * 4, 3)
    second = cells["Answer"](0, 20 * millisecond, 50 * millisecond, [15 * millisecond] * 2, 3)
    failed = cells["Answer"](0, 0, 0, [], 0, 0, "2 tokens instead of 3")
    outcome = cells["Outcome"]([first, second, failed], 0.5, 2, 0.25)
    figures = cells["summarise"]("slipstream", "own", cell, outcome, [])
    assert figures.tokens_per_second == pytest.approx(6 / 0.050)
    assert (figures.completed, figures.errors) == (2, ["2 tokens instead of 3"])
    assert (figures.ttft.mean, figures.ttft.p50) == (15.0, 15.0)
    assert figures.itl.mean == pytest.approx((4 * 5 + 2 * 15) / 6)
    assert figures.tpot == pytest.approx((20 / 2 + 30 / 2) / 2)
    assert figures.tokens_per_event == pytest.approx(6 / 8)
