"""Load on a server: requests kept in flight or sent at a rate, and the times of their answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from slipstream.client.connection import Connection, GrpcConnection, Request, ServerError
from slipstream.client.tensors import Array

_STABLE_WINDOWS = 3


@dataclass(frozen=True)
class Record:
    """One request and its answers. Times are nanoseconds of a monotonic clock."""

    request: Request
    sent: int
    answered: tuple[int, ...]
    outputs: tuple[Mapping[str, Array], ...]
    error: str = ""

    @property
    def last(self) -> int:
        return self.answered[-1]

    @property
    def latency(self) -> int:
        return self.last - self.sent


Sender = Callable[[Request], Record]


class LoadError(ValueError):
    """Requests of a load failed, or none was answered."""


def check_answers(records: Sequence[Record]) -> list[Record]:
    """Return the records. Raises LoadError if a request failed or nothing was answered."""
    failed = [record.error for record in records if record.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(records)} requests failed; the first: {failed[0]}")
    if not records:
        raise LoadError(
            "no request was answered; give a longer --measurement-interval or a --request-count"
        )
    return list(records)


def stream_sender(connection: GrpcConnection) -> Sender:
    """Return a sender that uses a stream for each request and times every answer."""

    def send(request: Request) -> Record:
        sent = time.monotonic_ns()
        times = []
        outputs = []
        try:
            for answer in connection.stream([request]):
                times.append(time.monotonic_ns())
                outputs.append(answer.outputs)
        except ServerError as error:
            return failed_record(request, sent, error)
        error_text = "" if times else "no answer came"
        return Record(request, sent, tuple(times), tuple(outputs), error_text)

    return send


def single_sender(connection: Connection) -> Sender:
    """Return a sender for models that give one answer."""

    def send(request: Request) -> Record:
        sent = time.monotonic_ns()
        try:
            answer = connection.infer(request)
        except ServerError as error:
            return failed_record(request, sent, error)
        return Record(request, sent, (time.monotonic_ns(),), (answer.outputs,))

    return send


def failed_record(request: Request, sent: int, error: ServerError) -> Record:
    return Record(request, sent, (time.monotonic_ns(),), (), str(error))


class Load:
    """Sends requests until it is closed or they run out.

    `workers` requests are in flight, or with `waits`, a request is sent after each of these times
    in seconds. `mark` returns the time at which a window begins or ends, in nanoseconds. Its first
    call comes before the first request.
    """

    def __init__(
        self,
        send: Sender,
        requests: Iterator[Request],
        workers: int,
        waits: Iterator[float] | None = None,
        mark: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._send = send
        self._requests = requests
        self._waits = waits
        self._done: list[Record] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        targets = [self._keep_sending] * workers if waits is None else [self._send_at_a_rate]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        self.mark = mark
        self.begun = mark()
        for thread in self._threads:
            thread.start()

    def records(self) -> list[Record]:
        with self._lock:
            return list(self._done)

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Send no further requests, and wait for those in flight."""
        self._closing.set()
        for thread in list(self._threads):
            thread.join()

    def _next(self) -> Request | None:
        with self._lock:
            return None if self._closing.is_set() else next(self._requests, None)

    def _one(self, request: Request) -> None:
        record = self._send(request)
        with self._lock:
            self._done.append(record)

    def _keep_sending(self) -> None:
        while (request := self._next()) is not None:
            self._one(request)

    def _send_at_a_rate(self) -> None:
        assert self._waits is not None
        started = []
        due = time.monotonic()
        while (request := self._next()) is not None:
            due += next(self._waits)
            if self._closing.wait(max(0.0, due - time.monotonic())):
                break
            started.append(threading.Thread(target=self._one, args=(request,), daemon=True))
            started[-1].start()
        for thread in started:
            thread.join()


class Measured(NamedTuple):
    records: list[Record]  # requests answered or failed within the windows
    boundaries: list[int]  # start and end of the windows, in nanoseconds
    stable: bool


class WindowRule(NamedTuple):
    """The end of a measurement: after three windows in a row that are about equal."""

    seconds: float  # length of a window
    max_difference: float  # difference from the mean of the three, as a share
    max_windows: int


def measure(load: Load, rule: WindowRule | None) -> Measured:
    """Measure a load in windows, or without a rule, until its requests have run out."""
    if rule is None:
        return measure_all(load)
    try:
        return measure_windows(load, rule)
    finally:
        load.close()


def measure_windows(load: Load, rule: WindowRule) -> Measured:
    """Measure a load in windows. A window lasts until at least one request is answered."""
    boundaries = [load.begun]
    stable = False
    while len(boundaries) <= rule.max_windows and not stable:
        time.sleep(rule.seconds)
        while load.running and not _within(load.records(), boundaries[-1], time.monotonic_ns()):
            time.sleep(min(rule.seconds, 0.1))
        boundaries.append(load.mark())
        stable = _is_stable(load.records(), boundaries, rule.max_difference)
        if not load.running:
            break
    kept = boundaries[-_STABLE_WINDOWS - 1 :]
    return Measured(_within(load.records(), kept[0], kept[-1]), kept, stable)


def measure_all(load: Load) -> Measured:
    """Measure a load until its requests have run out."""
    while load.running:
        time.sleep(0.01)
    return Measured(load.records(), [load.begun, load.mark()], True)


def _within(records: Iterable[Record], begin: int, end: int) -> list[Record]:
    return [record for record in records if begin < record.last <= end]


def _is_stable(records: Sequence[Record], boundaries: Sequence[int], most: float) -> bool:
    if len(boundaries) <= _STABLE_WINDOWS:
        return False
    rates = []
    latencies = []
    for begin, end in itertools.pairwise(boundaries[-_STABLE_WINDOWS - 1 :]):
        window = _within(records, begin, end)
        if not window:
            return False
        rates.append(len(window) / (end - begin))
        latencies.append(fmean(record.latency for record in window))
    return _are_near_mean(rates, most) and _are_near_mean(latencies, most)


def _are_near_mean(values: Sequence[float], most: float) -> bool:
    mean = fmean(values)
    return all(abs(value - mean) <= most * mean for value in values)
