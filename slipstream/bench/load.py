"""Load on a server: requests kept in flight or sent at a rate, and when each of their answers came."""

from __future__ import annotations

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
    """One request: when it was sent and when each answer came, in nanoseconds of one clock, and
    what they held.
    """

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


def stream_sender(connection: GrpcConnection) -> Sender:
    """Every request over a stream of its own; its answers are timed as they come."""

    def send(request: Request) -> Record:
        sent, times, outputs = time.monotonic_ns(), [], []
        try:
            for answer in connection.stream([request]):
                times.append(time.monotonic_ns())
                outputs.append(answer.outputs)
        except ServerError as error:
            return _failed(request, sent, error)
        return Record(
            request, sent, tuple(times), tuple(outputs), "" if times else "no answer came"
        )

    return send


def single_sender(connection: Connection) -> Sender:
    def send(request: Request) -> Record:
        sent = time.monotonic_ns()
        try:
            answer = connection.infer(request)
        except ServerError as error:
            return _failed(request, sent, error)
        return Record(request, sent, (time.monotonic_ns(),), (answer.outputs,))

    return send


def _failed(request: Request, sent: int, error: ServerError) -> Record:
    return Record(request, sent, (time.monotonic_ns(),), (), str(error))


class Load:
    """Sends requests until it is closed or they run out: `workers` at a time, or after `waits` of
    so many seconds.
    """

    def __init__(
        self,
        send: Sender,
        requests: Iterator[Request],
        workers: int,
        waits: Iterator[float] | None = None,
    ) -> None:
        self._send, self._requests, self._waits = send, requests, waits
        self._done: list[Record] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        targets = [self._keep_sending] * workers if waits is None else [self._send_at_a_rate]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        self.begun = time.monotonic_ns()
        for thread in self._threads:
            thread.start()

    def records(self) -> list[Record]:
        with self._lock:
            return list(self._done)

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """No further requests; those in flight are waited for."""
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
        started, due = [], time.monotonic()
        while (request := self._next()) is not None:
            due += next(self._waits)
            if self._closing.wait(max(0.0, due - time.monotonic())):
                break
            started.append(threading.Thread(target=self._one, args=(request,), daemon=True))
            started[-1].start()
        for thread in started:
            thread.join()


class Measured(NamedTuple):
    records: list[Record]  # answered within the windows, the failed ones too
    boundaries: list[int]  # nanoseconds
    stable: bool


class WindowRule(NamedTuple):
    """Windows of so many seconds, until three in a row differ from their mean by no more than this
    share.
    """

    seconds: float
    most_difference: float
    most_windows: int


def measure_windows(load: Load, rule: WindowRule) -> Measured:
    """Watch a load for some windows. One in which nothing was answered is made longer until
    something is.
    """
    boundaries, stable = [load.begun], False
    while len(boundaries) <= rule.most_windows and not stable:
        time.sleep(rule.seconds)
        while load.running and not _within(load.records(), boundaries[-1], time.monotonic_ns()):
            time.sleep(min(rule.seconds, 0.1))
        boundaries.append(time.monotonic_ns())
        stable = _is_stable(load.records(), boundaries, rule.most_difference)
        if not load.running:
            break
    kept = boundaries[-_STABLE_WINDOWS - 1 :]
    return Measured(_within(load.records(), kept[0], kept[-1]), kept, stable)


def measure_all(load: Load) -> Measured:
    """Until the requests have run out."""
    while load.running:
        time.sleep(0.01)
    return Measured(load.records(), [load.begun, time.monotonic_ns()], True)


def _within(records: Iterable[Record], begin: int, end: int) -> list[Record]:
    return [record for record in records if begin < record.last <= end]


def _is_stable(records: Sequence[Record], boundaries: Sequence[int], most: float) -> bool:
    if len(boundaries) <= _STABLE_WINDOWS:
        return False
    rates, latencies = [], []
    for begin, end in zip(
        boundaries[-_STABLE_WINDOWS - 1 :], boundaries[-_STABLE_WINDOWS:], strict=False
    ):
        window = _within(records, begin, end)
        if not window:
            return False
        rates.append(len(window) / (end - begin))
        latencies.append(fmean(record.latency for record in window))
    return all(
        abs(value - fmean(values)) <= most * fmean(values)
        for values in (rates, latencies)
        for value in values
    )
