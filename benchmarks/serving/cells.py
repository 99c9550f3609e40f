"""One measurement: one load on one server, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

NANOSECONDS_PER_MS = 1_000_000
COMPLETIONS = "completions"
GENERATE_STREAM = "generate_stream"
GRPC = "grpc"
APIS = (COMPLETIONS, GENERATE_STREAM, GRPC)
GREEDY: dict[str, float] = {"temperature": 0.0}
SAMPLED: dict[str, float] = {"temperature": 0.7, "top_p": 0.9}


@dataclass(frozen=True)
class Cell:
    """One load: requests in flight, or with a rate, requests a second at random times."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    rate: float = 0.0  # requests a second; 0: `concurrency` requests are always in flight
    sampled: bool = False
    api: str = COMPLETIONS
    seed: int = 0

    @property
    def sampling(self) -> dict[str, float]:
        return SAMPLED if self.sampled else GREEDY

    @property
    def load(self) -> str:
        level = f"{self.rate:g}/s" if self.rate else f"{self.concurrency}"
        parts = [level, "sampled" if self.sampled else ""]
        if self.api != COMPLETIONS:
            parts.append("gRPC" if self.api == GRPC else "gen_stream")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are nanoseconds of the machine's monotonic clock."""

    sent: int
    first: int  # first event with text
    last: int
    gaps: list[int]  # between events with text
    tokens: int
    prompt_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        array = numpy.asarray(values, dtype=float)
        low, high = numpy.percentile(array, (50, 99))
        return cls(float(array.mean()), float(low), float(high))


@dataclass(frozen=True)
class ProcessTime:
    """CPU time of one kind of process during a load."""

    name: str
    processes: int
    seconds: float
    busiest_thread: float  # share of the load's time in which the busiest thread ran


@dataclass(frozen=True)
class Figures:
    """The figures of one load. Times are in milliseconds."""

    server: str
    client: str
    cell: Cell
    tokens_per_second: float
    requests_per_second: float = 0.0
    ttft: Spread | None = None  # time to the first text
    itl: Spread | None = None  # time between events with text, as `vllm bench serve` counts it
    tpot: float | None = None  # mean of (latency - ttft) / (tokens - 1)
    tokens_per_event: float = 1.0
    seconds: float = 0.0
    completed: int = 0
    errors: Sequence[str] = ()
    cpu: Sequence[ProcessTime] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """The answers of a load, and what the client itself used."""

    answers: list[Answer] = field(default_factory=list)
    client_seconds: float = 0.0  # CPU time of all processes of the client
    client_processes: int = 1
    busiest_client: float = 0.0  # share of the time in which the busiest process ran


def summarise(
    server: str, client: str, cell: Cell, outcome: Outcome, cpu: Sequence[ProcessTime]
) -> Figures:
    """Return the figures of a load. An answer with another number of tokens is an error."""
    good = [one for one in outcome.answers if not one.error]
    errors = [one.error for one in outcome.answers if one.error]
    if not good:
        return Figures(server, client, cell, 0.0, errors=errors or ["no answer"], cpu=cpu)
    seconds = (max(one.last for one in good) - min(one.sent for one in good)) / 1e9
    tokens = sum(one.tokens for one in good)
    gaps: list[float] = []
    for one in good:
        gaps += one.gaps
    several = [one for one in good if one.tokens > 1]
    own = ProcessTime(
        "client", outcome.client_processes, outcome.client_seconds, outcome.busiest_client
    )
    return Figures(
        server,
        client,
        cell,
        tokens / seconds,
        len(good) / seconds,
        _milliseconds([one.first - one.sent for one in good]),
        _milliseconds(gaps),
        _mean_tpot(several),
        tokens / (len(gaps) + len(good)),
        seconds,
        len(good),
        errors,
        [*cpu, own],
    )


def _milliseconds(values: Sequence[float]) -> Spread | None:
    return Spread.of([value / NANOSECONDS_PER_MS for value in values])


def _mean_tpot(answers: Sequence[Answer]) -> float | None:
    if not answers:
        return None
    each = [(one.last - one.first) / (one.tokens - 1) for one in answers]
    return float(numpy.mean(each)) / NANOSECONDS_PER_MS
