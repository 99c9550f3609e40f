"""Load on any model at several levels, as perf_analyzer measures and prints it."""

from __future__ import annotations

import csv
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from slipstream.bench.load import (
    Load,
    Measured,
    Sender,
    WindowRule,
    check_answers,
    measure,
    single_sender,
    stream_sender,
)
from slipstream.client.connection import Connection, GrpcConnection, Request

PERCENTILES = (50, 90, 95, 99)
_NANOSECONDS_PER_US = 1000
# phases of a request in the server's statistics
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


class ServerCounts(NamedTuple):
    """The counters of one model since the server started, or between two readings."""

    inferences: int
    executions: int
    requests: int
    nanoseconds: Mapping[str, int]  # total time of `success` and of each phase

    def since(self, before: ServerCounts) -> ServerCounts:
        return ServerCounts(
            self.inferences - before.inferences,
            self.executions - before.executions,
            self.requests - before.requests,
            {name: value - before.nanoseconds[name] for name, value in self.nanoseconds.items()},
        )

    def average_us(self, phase: str) -> float:
        return self.nanoseconds[phase] / 1000 / self.requests if self.requests else 0.0

    def lines(self) -> list[str]:
        """Return the lines that perf_analyzer prints."""
        parts = {phase: self.average_us(phase) for phase in _PHASES}
        total = self.average_us("success")
        overhead = max(0.0, total - sum(parts.values()))
        terms = [f"overhead {overhead:.0f} usec"]
        terms += [f"{phase.replace('_', ' ')} {value:.0f} usec" for phase, value in parts.items()]
        shown = " + ".join(terms)
        return [
            f"Inference count: {self.inferences}",
            f"Execution count: {self.executions}",
            f"Successful request count: {self.requests}",
            f"Avg request latency: {total:.0f} usec ({shown})",
        ]


def read_counts(document: Mapping[str, Any]) -> ServerCounts:
    """Read a statistics document. Over gRPC, numbers are texts and zeros are left out."""
    found = document["model_stats"][0]
    times = found.get("inference_stats", {})
    nanoseconds = {name: int(times.get(name, {}).get("ns", 0)) for name in ("success", *_PHASES)}
    return ServerCounts(
        int(found.get("inference_count", 0)),
        int(found.get("execution_count", 0)),
        int(times.get("success", {}).get("count", 0)),
        nanoseconds,
    )


@dataclass(frozen=True)
class LoadSettings:
    """The generation and measurement of one level of load."""

    model: str
    batch_size: int
    windows: WindowRule
    request_count: int = 0  # 0: measure in windows
    warmup_request_count: int = 0
    streaming: bool = False
    by_rate: bool = False  # levels are requests a second, otherwise requests in flight
    poisson: bool = False  # with by_rate: random intervals
    percentile: int | None = None  # reported instead of the mean

    @property
    def level_name(self) -> str:
        return "Request Rate" if self.by_rate else "Concurrency"

    @property
    def latency_name(self) -> str:
        return f"p{self.percentile}" if self.percentile else "Average"


class Level(NamedTuple):
    """The measurement of one level of load."""

    value: float  # requests in flight, or requests a second
    measured: Measured
    inferences_per_second: float
    latency_us: float  # the mean or the requested percentile
    latencies_us: list[float]
    server: ServerCounts


def parse_levels(text: str) -> list[float]:
    """Return the levels of FIRST[:LAST[:STEP]], including the last."""
    parts = text.split(":")
    if len(parts) == 1:
        parts.append(parts[0])
    if len(parts) == 2:
        parts.append("1")
    try:
        first, last, step = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"'{text}' is not FIRST:LAST:STEP") from None
    if first <= 0 or step <= 0:
        raise ValueError(f"'{text}': FIRST and STEP must be over 0")
    return list(itertools.takewhile(lambda level: level <= last, itertools.count(first, step)))


def measure_level(
    connection: Connection, requests: Sequence[Request], settings: LoadSettings, value: float
) -> Level:
    """Measure one level of load: first the warm-up requests, then the measurement.

    The server's counts are read where the measured windows begin and end, so that they are of the
    same time as the client's.
    """
    send = _sender(connection, settings.streaming)
    for request in itertools.islice(itertools.cycle(requests), settings.warmup_request_count):
        check_answers([send(request)])
    counts: dict[int, ServerCounts] = {}  # by the time of the window that begins or ends there

    def mark() -> int:
        found = read_counts(connection.statistics(settings.model))
        now = time.monotonic_ns()
        counts[now] = found
        return now

    measured = _measure(send, requests, settings, value, mark)
    server = counts[measured.boundaries[-1]].since(counts[measured.boundaries[0]])
    records = check_answers(measured.records)
    seconds = (measured.boundaries[-1] - measured.boundaries[0]) / 1e9
    latencies = [record.latency / _NANOSECONDS_PER_US for record in records]
    latency = statistics.fmean(latencies)
    if settings.percentile:
        latency = float(numpy.percentile(latencies, settings.percentile))
    rate = len(records) * settings.batch_size / seconds
    return Level(value, measured, rate, latency, latencies, server)


def _sender(connection: Connection, streaming: bool) -> Sender:
    if not streaming:
        return single_sender(connection)
    assert isinstance(connection, GrpcConnection)
    return stream_sender(connection)


def _measure(
    send: Sender,
    requests: Sequence[Request],
    settings: LoadSettings,
    value: float,
    mark: Callable[[], int],
) -> Measured:
    endless: Iterator[Request] = itertools.cycle(requests)
    if settings.request_count:
        endless = itertools.islice(endless, settings.request_count)
    waits = _waits(value, settings.poisson) if settings.by_rate else None
    load = Load(send, endless, max(1, int(value)), waits, mark)
    return measure(load, None if settings.request_count else settings.windows)


def _waits(rate: float, poisson: bool) -> Iterator[float]:
    generator = numpy.random.default_rng(0)
    while True:
        yield float(generator.exponential(1 / rate)) if poisson else 1 / rate


def level_lines(level: Level, settings: LoadSettings) -> list[str]:
    """Return the lines that perf_analyzer prints for a level."""
    latencies = level.latencies_us
    name = "Request Rate" if settings.by_rate else "Request concurrency"
    lines = [f"{name}: {level.value:g}"]
    if not level.measured.stable:
        limit = settings.windows.max_difference * 100
        lines.append(f"  [WARNING] the windows differ by more than {limit:g}%")
    deviation = statistics.pstdev(latencies)
    mean = statistics.fmean(latencies)
    lines += [
        "  Client:",
        f"    Request count: {len(latencies)}",
        f"    Throughput: {level.inferences_per_second:g} infer/sec",
        f"    Avg latency: {mean:.0f} usec (standard deviation {deviation:.0f} usec)",
    ]
    for percent in PERCENTILES:
        lines.append(f"    p{percent} latency: {_percentile(level, percent):.0f} usec")
    lines.append("  Server:")
    lines += [f"    {line}" for line in level.server.lines()]
    return lines


def _percentile(level: Level, percent: int) -> float:
    return float(numpy.percentile(level.latencies_us, percent))


def csv_table(levels: Sequence[Level], settings: LoadSettings) -> str:
    """Return perf_analyzer's CSV report, one row per level.

    The time between client and server is one column, because its parts are not measured.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            settings.level_name,
            "Inferences/Second",
            "Client Send",
            "Network+Server Send/Recv",
            "Server Queue",
            "Server Compute Input",
            "Server Compute Infer",
            "Server Compute Output",
            "Client Recv",
            *(f"p{percent} latency" for percent in PERCENTILES),
        ]
    )
    for level in levels:
        phases = [level.server.average_us(phase) for phase in _PHASES]
        network = max(0.0, statistics.fmean(level.latencies_us) - sum(phases))
        percentiles = [_percentile(level, percent) for percent in PERCENTILES]
        figures = [f"{figure:.0f}" for figure in (0, network, *phases, 0, *percentiles)]
        writer.writerow([f"{level.value:g}", f"{level.inferences_per_second:g}", *figures])
    return text.getvalue()
