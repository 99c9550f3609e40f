"""The search for the highest load within limits, with a sender whose capacity is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.load import LoadError, Record, WindowRule
from slipstream.bench.progress import progress_text
from slipstream.bench.sweep import RATE_TOLERANCE, Objective, find_knee, parse_objectives
from slipstream.bench.text_load import LoadLevel, TextLoad
from slipstream.bench.tokenizer import WordTokenizer
from slipstream.cli import bench
from slipstream.cli.arguments import UsageError
from slipstream.cli.bench_flags import check, create_parser
from slipstream.client.connection import Request
from slipstream.client.tensors import texts

MS = 1_000_000
SLOTS = 11  # requests that the server answers at once


class Text:
    """A model whose tensors have the usual names."""

    name = "m"
    text_output = "text_output"

    def input_name(self, field_name: str) -> str:
        return field_name

    def request(self, row: dict[str, Any], number: int) -> Request:
        return Request("m", {"text_input": texts([row["text_input"]])}, request_id=str(number))


class SlottedLoad(TextLoad):
    """A server that answers SLOTS requests in 100 ms each; more of them take in proportion longer.

    The times are computed, so that the speed of the machine does not matter.
    """

    def __init__(self, fails_from: float = 1e9) -> None:
        super().__init__(self.answer, [Text()], WordTokenizer())
        self._fails_from = fails_from
        self._load = 1.0
        self.loads: list[float] = []

    def measure(self, requests: Any, level: LoadLevel, count: int, windows: WindowRule) -> Any:
        self._load = level.value
        self.loads.append(level.value)
        return super().measure(requests, LoadLevel(level.concurrency), count, windows)

    def answer(self, request: Request) -> Record:
        if self._load >= self._fails_from:
            return Record(request, 0, (1,), (), "the queue is full")
        latency = int(100 * MS * max(1.0, self._load / SLOTS))
        outputs = ({"text_output": texts(["one "])}, {"text_output": texts(["two"])})
        return Record(request, 0, (latency // 4, latency), outputs)


def search(load: SlottedLoad, folder: Path, *flags: str) -> bool:
    words = ["-m", "m", "--streaming", "--request-count", "2", "--artifact-dir", str(folder)]
    given = create_parser().parse([*words, *flags])
    check(given)
    rows = [{"model": "m", "text_input": "a b c"}]
    found = bench.Bench(given, load, rows, bench.announce_file)
    met = found.search()
    found.report("")
    return met


def test_the_knee_of_a_known_capacity_is_found(tmp_path: Path, capsys: Any) -> None:
    load = SlottedLoad()
    assert search(load, tmp_path, "--slo", "latency=100,ttft.p50=25")
    assert load.loads == [1, 2, 4, 8, 16, 12, 10, 11]
    printed = capsys.readouterr().out
    assert "[INFO] 12 in flight: too much: latency.p99 109.1 ms > 100 ms" in printed
    assert (
        "Highest load that meets latency.p99 <= 100 ms, ttft.p50 <= 25 ms: 11 in flight" in printed
    )
    assert "genai_perf.export_data" not in printed
    # the table has all levels, in order of their load
    table = printed[printed.index("by requests in flight") :]
    loads = [line.split()[0] for line in table.splitlines() if line[:5].strip().isdigit()]
    assert loads == ["1", "2", "4", "8", "10", "11", "12", "16"]


def test_the_knee_of_a_rate_is_found(tmp_path: Path, capsys: Any) -> None:
    load = SlottedLoad()
    assert search(load, tmp_path, "--slo", "latency=200", "--request-rate", "3")
    assert load.loads[:4] == [3, 6, 12, 24]
    best = max(rate for rate in load.loads if rate <= 2 * SLOTS)
    assert 2 * SLOTS / (1 + RATE_TOLERANCE) <= best <= 2 * SLOTS
    assert f": {best:g} requests a second" in capsys.readouterr().out


def test_failed_requests_are_too_much_load(tmp_path: Path, capsys: Any) -> None:
    load = SlottedLoad(fails_from=6)
    assert search(load, tmp_path, "--slo", "latency=1000")
    assert max(rate for rate in load.loads if rate < 6) == 5
    assert (
        "8 in flight: too much: 2 of 2 requests failed; the first: the queue is full"
        in capsys.readouterr().out
    )
    with pytest.raises(LoadError, match="the queue is full"):
        search(SlottedLoad(fails_from=1), tmp_path, "--slo", "latency=1000")


def test_a_search_without_a_result_says_so(tmp_path: Path, capsys: Any) -> None:
    assert not search(SlottedLoad(), tmp_path, "--slo", "latency=99")
    assert "No load meets latency.p99 <= 99 ms" in capsys.readouterr().out


def test_a_search_ends_at_the_highest_load(tmp_path: Path, capsys: Any) -> None:
    load = SlottedLoad()
    assert search(load, tmp_path, "--slo", "latency=1000", "--slo-max", "20")
    assert load.loads == [1, 2, 4, 8, 16, 20]
    assert "20 in flight" in (printed := capsys.readouterr().out)
    assert "higher loads were not tried (--slo-max 20)" in printed


@pytest.mark.parametrize("knee", [1, 2, 3, 37, 63, 64, 65, 100])
def test_every_knee_is_found(knee: int) -> None:
    tried: list[float] = []

    def meets(load: float) -> bool:
        tried.append(load)
        return load <= knee

    assert find_knee(meets, 1, 100, whole=True) == knee
    assert len(tried) == len(set(tried)) <= 14
    found = find_knee(lambda rate: rate <= knee + 0.5, 0.25, 1000, whole=False)
    assert found is not None
    assert (knee + 0.5) / (1 + RATE_TOLERANCE) <= found <= knee + 0.5


def test_limits_have_names_statistics_and_numbers() -> None:
    assert parse_objectives("ttft=500, itl.p90=50.5") == (
        Objective("ttft", "p99", 500.0),
        Objective("itl", "p90", 50.5),
    )
    for text, reason in (
        ("speed=1", "with a name of ttft, itl, latency"),
        ("ttft", "NAME=MILLISECONDS"),
        ("ttft.p12=1", "statistic must be one of avg,"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_objectives(text)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--slo", "ttft=5", "-m", "m"], "needs --streaming"),
        (["--slo", "latency=5", "-m", "m", "--concurrency", "1,2"], "give one number"),
        (["--slo", "latency=5", "-m", "m", "--concurrency", "8", "--slo-max", "4"], "below the"),
    ],
)
def test_flags_that_a_search_cannot_use_are_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check(create_parser().parse(flags))


def test_progress_names_what_is_left() -> None:
    windows = WindowRule(10.0, 0.1, 10)
    assert progress_text(20, 10.0, 50, windows) == "20 of 50 requests in 10 s, 2.0/s, 15 s left"
    assert progress_text(0, 10.0, 50, windows) == "0 of 50 requests in 10 s, 0.0/s"
    assert progress_text(5, 10.0, 0, windows) == "5 requests in 10 s, 0.5/s, 20 s left"
    assert progress_text(5, 40.0, 0, windows).endswith("until windows are equal")
