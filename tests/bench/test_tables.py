"""The tables of measurements: no number is cut, also at 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command_line import run_cli
from rich.console import Console

from slipstream.bench.llm_metrics import LlmMetrics, Metric
from slipstream.bench.llm_report import json_report
from slipstream.bench.tables import (
    LoadRow,
    ReportError,
    change,
    compact,
    print_comparison,
    print_loads,
    print_metrics,
    read_report,
)

LATENCIES = ("time_to_first_token", "inter_token_latency", "request_latency")


def metrics(scale: float = 1.0) -> LlmMetrics:
    rows = [
        Metric(name, "ms", tuple(scale * (number + 0.25) for number in range(100)))
        for name in LATENCIES
    ]
    lengths = Metric("output_sequence_length", "tokens", (64.0,) * 100)
    rates = Metric("output_token_throughput_per_request", "tokens/sec", (9.0,) * 100)
    return LlmMetrics((*rows, lengths, rates), 1234.5 * scale, 17.25)


def printed(width: int, print_table, *arguments) -> list[str]:
    file = io.StringIO()
    print_table(*arguments, Console(file=file, width=width, highlight=False))
    return file.getvalue().splitlines()


def numbers(line: str) -> list[str]:
    return [word for word in line.replace("│", " ").split() if word[0].isdigit()]


def test_a_wide_table_has_every_statistic_and_two_decimals():
    lines = printed(120, print_metrics, metrics())
    head = next(line for line in lines if "Statistic" in line)
    assert head.replace("┃", " ").split() == [
        *("Statistic", "avg", "min", "max", "p99", "p90", "p75", "p50")
    ]
    row = next(line for line in lines if "Request latency (ms)" in line)
    assert numbers(row) == ["49.75", "0.25", "99.25", "98.26", "89.35", "74.50", "49.75"]
    assert "Output token throughput (per sec): 1,234.50" in lines
    assert not any("throughput per request" in line for line in lines)


@pytest.mark.parametrize("scale", [1, 1000, 987_654])
def test_a_narrow_table_cuts_no_number(scale: float):
    lines = printed(80, print_metrics, metrics(scale))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    row = next(line for line in lines if "Time to first token (ms)" in line)
    assert numbers(row)[-1] == compact(
        metrics(scale).by_name()["request_latency"].statistics["p50"]
    )
    assert len(numbers(row)) == 6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.01"), (9.87, "9.87"), (123.45, "123.5"), (12345.6, "12,346"), (2.5e6, "2.50M")],
)
def test_compact_numbers_have_at_most_seven_characters(value: float, text: str):
    assert compact(value) == text


def test_several_loads_are_lines_of_one_table():
    rows = [LoadRow(1, metrics()), LoadRow(16, metrics(1000))]
    lines = printed(80, print_loads, "requests in flight", rows)
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= 80
    heads = " ".join(lines)
    for title in ("First token", "Between tokens", "Request", "Tokens /s", "Requests /s"):
        assert all(word in heads for word in title.split())
    assert lines[0].strip() == "Latencies in ms, by requests in flight"
    first, second = lines[-3:-1]
    assert numbers(first)[0] == "1"
    assert numbers(first)[1:] == [*("49.75", "98.26") * 3, "1,234", "17.25"]
    assert numbers(second)[:3] == ["16", "49,750", "98,260"]


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, scale in zip(files, (1.0, 1.5), strict=True):
        file.write_text(json_report(metrics(scale), {"model": ["m"]}))
    return files


def test_reports_are_compared_with_the_first_one(reports: list[Path]):
    lines = printed(80, print_comparison, reports)
    assert lines[:2] == [f"A: {reports[0]}", f"B: {reports[1]}"] or "A: " in lines[0]
    row = next(line for line in lines if "First token p50 (ms)" in line)
    assert row.split()[-4:] == ["49.75", "74.62", "+50.0", "%"]
    assert next(line for line in lines if "Requests/s" in line).split()[-2:] == ["+0.0", "%"]


def test_the_command_compares_without_a_server(reports: list[Path], tmp_path: Path):
    result = run_cli(["bench", "--compare", *reports])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "+50.0 %" in result.stdout
    wrong = tmp_path / "wrong.json"
    for text in ("[]", "x", '{"a": 1}'):
        wrong.write_text(text)
        refused = run_cli(["bench", "--compare", reports[0], wrong])
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert str(wrong) in refused.stderr
    with pytest.raises(ReportError):
        read_report(wrong)


def test_a_change_needs_two_values():
    assert [change(None, 1.0), change(0.0, 1.0), change(1.0, None)] == ["", "", ""]
    assert change(2.0, 1.0) == "-50.0 %"
