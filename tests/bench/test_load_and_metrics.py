"""Load generation: metrics computed by hand, request data, prompts and windows."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy
import pytest

from slipstream.bench.core_model_report import Sample, find_differences, write_trace
from slipstream.bench.input_data import (
    DataError,
    batch_rows,
    generate_row,
    input_tensors,
    read_rows,
)
from slipstream.bench.llm_metrics import llm_metrics
from slipstream.bench.llm_report import csv_report, json_report
from slipstream.bench.load import Load, Record, WindowRule, measure_all, measure_windows
from slipstream.bench.perf_analyzer import LoadSettings, level_lines, measure_level
from slipstream.bench.prompts import HISTOGRAMS, Lengths, histogram_prompts, synthetic_prompt
from slipstream.client.connection import Answer, Connection, Request
from slipstream.client.tensors import texts

MS = 1_000_000


def record(sent: int, *answers: tuple[int, str], prompt: str = "one two") -> Record:
    request = Request("m", {"text_input": texts([prompt])})
    return Record(
        request,
        sent * MS,
        tuple(time * MS for time, _ in answers),
        tuple({"text_output": texts([text])} for _, text in answers),
    )


def words(text: str) -> int:
    return len(text.split())


def test_metrics_of_a_streamed_load() -> None:
    # 3 tokens: 10 ms to the first token, then 10 ms each
    first = record(0, (10, "a "), (20, "b "), (30, "c"))
    # 5 tokens; the empty last answer counts for the latency
    second = record(10, (30, "a b c d e "), (110, ""))
    found = llm_metrics([first, second], words, True, ("text_input", "text_output"))
    values = {row.name: row.values for row in found.rows}
    assert values["time_to_first_token"] == (10.0, 20.0)
    assert values["inter_token_latency"] == (10.0, 20.0)
    assert values["request_latency"] == (30.0, 100.0)
    assert values["output_sequence_length"] == (3.0, 5.0)
    assert values["input_sequence_length"] == (2.0, 2.0)
    assert found.output_tokens_per_second == pytest.approx(8 / 0.110)
    assert found.requests_per_second == pytest.approx(2 / 0.110)
    statistics = found.by_name()["request_latency"].statistics
    assert statistics == pytest.approx(
        {
            "avg": 65,
            "p25": 47.5,
            "p50": 65,
            "p75": 82.5,
            "p90": 93,
            "p95": 96.5,
            "p99": 99.3,
            "min": 30,
            "max": 100,
            "std": 35,
        }
    )


def test_a_load_without_streams_has_no_time_to_first_token() -> None:
    found = llm_metrics([record(0, (1234, "a b"))], words, False, ("text_input", "text_output"))
    assert [row.name for row in found.rows][:2] == ["request_latency", "output_sequence_length"]
    lines = csv_report(found).splitlines()
    assert lines[1].startswith('Request Latency (ms),"1,234.00","1,234.00"')
    assert lines[-2:] == [
        "Output Token Throughput (per sec),1.62",
        "Request Throughput (per sec),0.81",
    ]
    assert json.loads(json_report(found, {"model": ["m"]}))["input_config"] == {"model": ["m"]}


class Together:
    """A sender that answers once `count` requests are in flight, and keeps their maximum."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0

    def __call__(self, request: Request) -> Record:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        sent = time.monotonic_ns()
        self._barrier.wait()
        with self._lock:
            self._running -= 1
        return Record(request, sent, (time.monotonic_ns(),), ({},))


def answer(request: Request) -> Record:
    sent = time.monotonic_ns()
    time.sleep(0.002)
    return Record(request, sent, (time.monotonic_ns(),), ({},))


def requests() -> itertools.cycle[Request]:
    return itertools.cycle([Request("m", {})])


def test_the_number_of_requests_in_flight_is_the_concurrency() -> None:
    send = Together(4)
    measured = measure_all(Load(send, itertools.islice(requests(), 20), 4))
    assert len(measured.records) == 20
    assert send.most == 4


def test_a_request_rate_does_not_wait_for_answers() -> None:
    load = Load(Together(5), itertools.islice(requests(), 5), 1, itertools.repeat(0.001))
    assert len(measure_all(load).records) == 5


def test_windows_end_when_three_are_stable_or_at_the_maximum() -> None:
    load = Load(answer, requests(), 2)
    settled = measure_windows(load, WindowRule(0.03, 10.0, 10))
    load.close()
    assert settled.stable
    assert len(settled.boundaries) == 4
    assert all(
        settled.boundaries[0] < one.last <= settled.boundaries[-1] for one in settled.records
    )
    load = Load(answer, requests(), 2)
    unsettled = measure_windows(load, WindowRule(0.02, 0.0, 4))
    load.close()
    assert not unsettled.stable


class CountingServer:
    """A server that counts a request as it answers it, and its statistics."""

    def __init__(self) -> None:
        self.served = 0
        self.readings: list[int] = []
        self._lock = threading.Lock()

    def infer(self, request: Request) -> Answer:
        time.sleep(0.001)
        with self._lock:
            self.served += 1
        return Answer({})

    def statistics(self, model: str) -> dict[str, Any]:
        served = self.served
        self.readings.append(served)
        count = {"count": str(served), "ns": str(served * 5000)}
        stats = {"inference_count": str(served), "inference_stats": {"success": count}}
        return {"model_stats": [stats]}


def test_the_server_counts_the_requests_of_the_measured_windows_only() -> None:
    server = CountingServer()
    settings = LoadSettings("m", 1, WindowRule(0.02, 0.0, 8), warmup_request_count=3)
    level = measure_level(cast(Connection, server), [Request("m", {})], settings, 2)
    assert len(server.readings) == 9  # where each of the eight windows begins and ends
    assert len(level.measured.boundaries) == 4  # the last three windows are measured
    assert level.server.requests == server.readings[8] - server.readings[5]
    assert level.server.inferences == level.server.requests
    assert level.server.average_us("success") == 5
    begin, *_, end = level.measured.boundaries
    assert all(begin < record.last <= end for record in level.measured.records)


def test_a_number_of_requests_is_counted_alike_by_client_and_server() -> None:
    server = CountingServer()
    settings = LoadSettings("m", 1, WindowRule(1, 0.1, 8), 25, warmup_request_count=3)
    level = measure_level(cast(Connection, server), [Request("m", {})], settings, 4)
    assert (len(level.measured.records), level.server.requests, server.served) == (25, 25, 28)
    lines = level_lines(level, settings)
    assert "    Request count: 25" in lines
    assert "    Successful request count: 25" in lines


CONFIG = {
    "input": [
        {"name": "ids", "data_type": "TYPE_INT32", "dims": ["-1"]},
        {"name": "text", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
    ]
}


def test_rows_of_a_file_become_batches(tmp_path: Path) -> None:
    rows = [
        {"ids": {"content": [1, 2], "shape": [2]}},
        {"ids": [3, 4], "model": "m"},
        {"ids": [5, 6]},
    ]
    (tmp_path / "data.json").write_text(json.dumps({"data": rows}))
    found = batch_rows(read_rows(tmp_path / "data.json", input_tensors(CONFIG, {})), 2)
    assert [batch["ids"].tolist() for batch in found] == [[[1, 2], [3, 4]], [[5, 6], [1, 2]]]


@pytest.mark.parametrize(
    ("row", "text"),
    [({"idz": [1]}, "the model has no input idz"), ({"text": "x"}, "the input ids is missing")],
)
def test_rows_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, row: dict[str, object], text: str
) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"data": [row]}))
    with pytest.raises(DataError, match=text):
        read_rows(tmp_path / "data.json", input_tensors(CONFIG, {}))


def test_generated_data_needs_shapes() -> None:
    with pytest.raises(DataError, match="give --shape ids"):
        generate_row(input_tensors(CONFIG, {}), False, None, 4)
    row = generate_row(input_tensors(CONFIG, {"ids": (3,)}), False, None, 4)
    assert {name: array.tolist() for name, array in row.items()} == {"ids": [0, 0, 0]}
    with pytest.raises(DataError, match="--shape other"):
        input_tensors(CONFIG, {"other": (1,)})


def test_synthetic_prompts_have_the_wanted_length_and_follow_the_seed() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    made = [
        synthetic_prompt(50, encode, decode, numpy.random.default_rng(seed)) for seed in (1, 1, 2)
    ]
    assert [len(prompt) for prompt in made] == [50] * 3
    assert made[0] == made[1] != made[2]
    assert {Lengths(7, 0).draw(numpy.random.default_rng(0)) for _ in range(3)} == {7}


def test_histogram_prompts_respect_the_longest_length() -> None:
    work = list(histogram_prompts(500, "example", 64, numpy.random.default_rng(0)))
    lengths = {len(one.tokens) for one in work}
    assert lengths == {length for length in HISTOGRAMS["example"]["input"] if length <= 64}
    assert {one.output_length for one in work} <= set(HISTOGRAMS["example"]["output"])


def test_figures_are_compared_with_absolute_and_relative_tolerance(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"a": {"x": 100, "y": 10}, "empty": {}}))
    rows = [("x", "104.00"), ("y", "10.40")]
    assert find_differences(tmp_path / "r.json", "a", rows, 0.0, 0.05) == []
    assert find_differences(tmp_path / "r.json", "a", rows, 0.0, 0.03) == [
        "x is 104.0, which is not near 100.0",
        "y is 10.4, which is not near 10.0",
    ]
    assert find_differences(tmp_path / "r.json", "a", rows, 5.0, 0.0) == []
    assert find_differences(tmp_path / "r.json", "a", rows[:1], 5.0, 0.0) == [
        "there is no figure 'y'; there are x"
    ]
    assert "no figures for 'b'" in find_differences(tmp_path / "r.json", "b", rows, 5.0, 0.0)[0]
    assert (
        "no figures for 'empty'"
        in find_differences(tmp_path / "r.json", "empty", rows, 5.0, 0.0)[0]
    )


def test_a_trace_begins_at_the_first_request(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [Sample(5.0, 5.5, 3, 4), Sample(5.25, 6.0, 1, 2)])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in events] == [
        (0.0, 500000.0),
        (250000.0, 750000.0),
    ]
