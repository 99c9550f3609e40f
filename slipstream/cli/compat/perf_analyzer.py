"""The old `perf_analyzer`: load on any model at several levels, and its lines of throughput and
latency.
"""

from __future__ import annotations

import csv
import io
import itertools
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

from slipstream.bench.input_data import DataError, batches, input_tensors, made_up_row, read_rows
from slipstream.bench.llm_report import profile_export
from slipstream.bench.load import (
    Load,
    Measured,
    Record,
    Sender,
    WindowRule,
    measure_all,
    measure_windows,
    single_sender,
    stream_sender,
)
from slipstream.bench.server_statistics import ServerCounts, counts_of
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import open_connection
from slipstream.client.connection import Connection, GrpcConnection, Request, ServerError
from slipstream.weights.whole_file import write_whole

_PERCENTILES = (50, 90, 95, 99)
_US = 1000  # nanoseconds


class Level(NamedTuple):
    value: float  # of concurrency, or requests a second
    measured: Measured
    inferences_per_second: float
    latency_us: float  # the mean, or the percentile that was asked for
    latencies_us: list[float]
    server: ServerCounts


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    if given.streaming and given.protocol != "grpc":
        raise CommandError("--streaming needs -i grpc")
    connection = open_connection(given)
    try:
        requests = _requests(given, connection)
        _print_settings(given)
        levels = list(_levels(given, connection, requests))
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    if given.latency_report_file is not None:
        _write_table(given.latency_report_file, given, levels)
    name = "Request Rate" if given.request_rate_range else "Concurrency"
    what = f"p{given.percentile}" if given.percentile else "Average"
    print(f"Inferences/Second vs. Client {what} Batch Latency")
    for level in levels:
        print(
            f"{name}: {level.value:g}, throughput: {level.inferences_per_second:g} infer/sec, "
            f"latency {level.latency_us:.0f} usec"
        )
    return 0


def _parser() -> Parser:
    parser = Parser(
        "perf_analyzer", description="Put load on a model and print its throughput and latency."
    )
    add = parser.add_argument
    add("-m", "--model-name", required=True, help="The model to ask.")
    add(
        "-u",
        "--url",
        help="The server's address; default: localhost:8000, or localhost:8001 with grpc.",
    )
    add(
        "-i",
        "--protocol",
        type=str.lower,
        default="http",
        choices=["http", "grpc"],
        help="How to ask.",
    )
    add(
        "--service-kind",
        default="triton",
        choices=["triton"],
        help="Other servers are not measured.",
    )
    add("-b", "--batch-size", type=int, default=1, help="Rows of data in a request.")
    add("--input-data", default="random", help="zero, random, or a JSON file of tensors.")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="NAME:DIM,DIM",
        help="The shape of an input left open.",
    )
    add("--string-data", help="The text in each text input, where there is no file.")
    add("--string-length", type=int, default=128, help="Letters of a random text.")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency-range", default="1", metavar="FIRST:LAST:STEP", help="Requests in flight."
    )
    load.add_argument("--request-rate-range", metavar="FIRST:LAST:STEP", help="Requests a second.")
    add(
        "--request-distribution",
        default="constant",
        choices=["constant", "poisson"],
        help="Of a request rate.",
    )
    add(
        "-a",
        "--async",
        dest="is_async",
        action="store_true",
        help="No effect: requests never wait for each other.",
    )
    add("--sync", action="store_true", help="No effect, for the same reason.")
    add(
        "--streaming",
        action="store_true",
        help="Ask over a gRPC stream, as a decoupled model needs it.",
    )
    add("-p", "--measurement-interval", type=float, default=5000, help="Milliseconds of a window.")
    add(
        "--measurement-mode",
        default="time_windows",
        choices=["time_windows", "count_windows"],
        help="Windows of time, or of --measurement-request-count requests.",
    )
    add(
        "--measurement-request-count",
        type=int,
        default=50,
        help="Requests of a window with count_windows.",
    )
    add(
        "-s",
        "--stability-percentage",
        type=float,
        default=10,
        help="How far three windows may differ.",
    )
    add("-r", "--max-trials", type=int, default=10, help="Windows at most.")
    add(
        "--percentile",
        type=int,
        choices=range(1, 100),
        metavar="1-99",
        help="Report it instead of the mean.",
    )
    add(
        "-l",
        "--latency-threshold",
        type=float,
        default=0,
        help="End the levels at this latency, in milliseconds.",
    )
    add(
        "--request-count",
        type=int,
        default=0,
        help="Send so many requests a level instead of measuring in windows.",
    )
    add(
        "--warmup-request-count",
        type=int,
        default=0,
        help="Requests before a level, which do not count.",
    )
    add("-f", "--latency-report-file", type=Path, help="Write the levels as CSV.")
    add("--profile-export-file", type=Path, help="Write every request's times, of the last level.")
    add("--max-threads", type=int, help="No effect: there is a thread for each request in flight.")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="No effect: everything there is to say is said.",
    )
    return parser


def _requests(given: Namespace, connection: Connection) -> list[Request]:
    config = connection.config(given.model_name)
    largest = int(config.get("max_batch_size", 0))
    if given.batch_size < 1 or given.batch_size > max(1, largest):
        raise CommandError(
            f"-b {given.batch_size}: the model takes batches of 1 to {max(1, largest)}"
        )
    try:
        tensors = input_tensors(config, dict(_shape(text) for text in given.shape))
        if given.input_data in ("zero", "random"):
            rows = [
                made_up_row(
                    tensors, given.input_data == "random", given.string_data, given.string_length
                )
            ]
        else:
            rows = read_rows(Path(given.input_data), tensors)
        inputs = batches(rows, given.batch_size if largest else 0)
    except DataError as error:
        raise CommandError(str(error)) from error
    return [
        Request(given.model_name, one, request_id=str(number)) for number, one in enumerate(inputs)
    ]


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    try:
        return name, tuple(int(dim) for dim in dims.split(","))
    except ValueError:
        raise CommandError(f"--shape takes NAME:DIM,DIM,…, not '{text}'") from None


def _values(given: Namespace) -> Iterator[float]:
    """The levels of FIRST[:LAST[:STEP]], the last one too."""
    text = given.request_rate_range or given.concurrency_range
    try:
        first, last, step = (float(part) for part in (*text.split(":"), *_missing(text)))
    except ValueError:
        raise CommandError(f"'{text}' is not FIRST:LAST:STEP") from None
    if first <= 0 or step <= 0:
        raise CommandError(f"'{text}': FIRST and STEP must be over 0")
    while first <= last:
        yield first
        first += step


def _missing(text: str) -> list[str]:
    parts = text.split(":")
    return [*([parts[0]] if len(parts) == 1 else []), *(["1"] if len(parts) < 3 else [])]


def _print_settings(given: Namespace) -> None:
    print("*** Measurement Settings ***")
    print(f"  Batch size: {given.batch_size}")
    print("  Service Kind: TRITON")
    if given.request_count:
        print(f"  Sending a total of {given.request_count} requests")
    else:
        print(f'  Using "{given.measurement_mode}" mode for stabilization')
        print(f"  Measurement window: {given.measurement_interval:g} msec")
    print(
        f"  Stabilizing using {f'p{given.percentile} latency' if given.percentile else 'average latency'}\n",
        flush=True,
    )


def _levels(given: Namespace, connection: Connection, requests: list[Request]) -> Iterator[Level]:
    for value in _values(given):
        level = _measure_level(given, connection, requests, value)
        yield level
        if given.latency_threshold and level.latency_us > given.latency_threshold * 1000:
            print(
                f"The latency is over {given.latency_threshold:g} msec: no further level is measured"
            )
            return


def _measure_level(
    given: Namespace, connection: Connection, requests: list[Request], value: float
) -> Level:
    send = _sender(given, connection)
    for request in itertools.islice(itertools.cycle(requests), given.warmup_request_count):
        _good([send(request)])
    before = counts_of(connection.statistics(given.model_name))
    measured = _measure(given, send, requests, value)
    server = counts_of(connection.statistics(given.model_name)).since(before)
    good = _good(measured.records)
    seconds = (measured.boundaries[-1] - measured.boundaries[0]) / 1e9
    latencies = [record.latency / _US for record in good]
    latency = (
        float(numpy.percentile(latencies, given.percentile))
        if given.percentile
        else statistics.fmean(latencies)
    )
    level = Level(
        value, measured, len(good) * given.batch_size / seconds, latency, latencies, server
    )
    _print_level(given, level)
    if given.profile_export_file is not None:
        mode = "request_rate" if given.request_rate_range else "concurrency"
        write_whole(given.profile_export_file, profile_export(measured, mode, value))
    return level


def _sender(given: Namespace, connection: Connection) -> Sender:
    if given.streaming:
        assert isinstance(connection, GrpcConnection)
        return stream_sender(connection)
    return single_sender(connection)


def _measure(given: Namespace, send: Sender, requests: list[Request], value: float) -> Measured:
    count = given.request_count
    if given.measurement_mode == "count_windows" and not count:
        count = given.measurement_request_count
    endless: Iterator[Request] = itertools.cycle(requests)
    rated = given.request_rate_range is not None
    load = Load(
        send,
        itertools.islice(endless, count) if count else endless,
        max(1, int(value)),
        _waits(given, value) if rated else None,
    )
    if count:
        return measure_all(load)
    rule = WindowRule(
        given.measurement_interval / 1000, given.stability_percentage / 100, given.max_trials
    )
    try:
        return measure_windows(load, rule)
    finally:
        load.close()


def _waits(given: Namespace, rate: float) -> Iterator[float]:
    generator = numpy.random.default_rng(0)
    while True:
        yield (
            float(generator.exponential(1 / rate))
            if given.request_distribution == "poisson"
            else 1 / rate
        )


def _good(records: Sequence[Record]) -> list[Record]:
    failed = [record.error for record in records if record.error]
    if failed:
        raise CommandError(
            f"{len(failed)} of {len(records)} requests failed; the first: {failed[0]}"
        )
    if not records:
        raise CommandError(
            "no request was answered within the window; give a longer --measurement-interval"
        )
    return list(records)


def _print_level(given: Namespace, level: Level) -> None:
    latencies = level.latencies_us
    what = "Request Rate" if given.request_rate_range else "Request concurrency"
    print(f"{what}: {level.value:g}")
    if not level.measured.stable:
        print(f"  [WARNING] the windows differ by more than {given.stability_percentage:g}%")
    print("  Client:")
    print(f"    Request count: {len(latencies)}")
    print(f"    Throughput: {level.inferences_per_second:g} infer/sec")
    deviation = statistics.pstdev(latencies)
    print(
        f"    Avg latency: {statistics.fmean(latencies):.0f} usec (standard deviation {deviation:.0f} usec)"
    )
    for percent in _PERCENTILES:
        print(f"    p{percent} latency: {float(numpy.percentile(latencies, percent)):.0f} usec")
    print("  Server:")
    for line in level.server.lines():
        print(f"    {line}")
    print(flush=True)


def _write_table(path: Path, given: Namespace, levels: Sequence[Level]) -> None:
    """A line for each level; what is between a client and its server is one column, for its parts
    are not timed.
    """
    name = "Request Rate" if given.request_rate_range else "Concurrency"
    columns = [
        name,
        "Inferences/Second",
        "Client Send",
        "Network+Server Send/Recv",
        "Server Queue",
        "Server Compute Input",
        "Server Compute Infer",
        "Server Compute Output",
        "Client Recv",
        *(f"p{percent} latency" for percent in _PERCENTILES),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for level in levels:
        phases = [
            level.server.average_us(phase)
            for phase in ("queue", "compute_input", "compute_infer", "compute_output")
        ]
        between = max(0.0, statistics.fmean(level.latencies_us) - sum(phases))
        figures = [
            0,
            between,
            *phases,
            0,
            *(numpy.percentile(level.latencies_us, p) for p in _PERCENTILES),
        ]
        writer.writerow(
            [f"{level.value:g}", f"{level.inferences_per_second:g}", *(f"{f:.0f}" for f in figures)]
        )
    write_whole(path, text.getvalue())
