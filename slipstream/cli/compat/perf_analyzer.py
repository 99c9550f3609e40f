"""The old `perf_analyzer`: load on any model at several levels."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slipstream.bench.input_data import batch_rows, generate_row, input_tensors, read_rows
from slipstream.bench.llm_report import profile_export
from slipstream.bench.load import WindowRule
from slipstream.bench.perf_analyzer import (
    Level,
    LoadSettings,
    csv_table,
    level_lines,
    measure_level,
    parse_levels,
)
from slipstream.cli.arguments import CommandError, Parser, add_verbose
from slipstream.cli.connections import connected
from slipstream.client.connection import Connection, Request
from slipstream.weights.whole_file import write_whole


def create_parser() -> Parser:
    parser = Parser("perf_analyzer", "Put load on a model and print its throughput and latency.")
    add = parser.add_argument
    add("-m", "--model-name", required=True, metavar="MODEL", help="Name of the model.")
    add(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="Address of the server (default: localhost:8000, or localhost:8001 with -i grpc).",
    )
    add(
        "-i",
        "--protocol",
        type=str.lower,
        default="http",
        choices=["http", "grpc"],
        help="Protocol of the requests.",
    )
    add(
        "--streaming",
        action="store_true",
        help="Use a gRPC stream, which a decoupled model needs.",
    )
    add(
        "--service-kind",
        default="triton",
        choices=["triton"],
        help="Protocol of the server; only Triton's is supported.",
    )
    _add_data(parser)
    _add_load(parser)
    _add_windows(parser)
    _add_measurement(parser)
    _add_files(parser)
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "-a",
        "--async",
        dest="is_async",
        action="store_true",
        help="Requests never wait for each other.",
    )
    ignored.add_argument("--sync", action="store_true", help="Requests never wait for each other.")
    ignored.add_argument(
        "--max-threads", type=int, help="There is one thread for each request in flight."
    )
    add_verbose(ignored)
    return parser


def _add_data(parser: Parser) -> None:
    add = parser.group("data").add_argument
    add("-b", "--batch-size", type=int, default=1, help="Rows of data per request.")
    add("--input-data", default="random", help="Data to send: zero, random, or a JSON file.")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="NAME:DIM,DIM",
        help="Shape of an input whose configuration leaves it open; can be repeated.",
    )
    add("--string-data", metavar="TEXT", help="Content of every text input (default: random).")
    add("--string-length", type=int, default=128, metavar="LETTERS", help="Length of random texts.")


def _add_load(parser: Parser) -> None:
    load = parser.alternatives()
    load.add_argument(
        "--concurrency-range",
        default="1",
        metavar="FIRST:LAST:STEP",
        help="Levels of load, as requests in flight.",
    )
    load.add_argument(
        "--request-rate-range",
        metavar="FIRST:LAST:STEP",
        help="Levels of load, as requests a second.",
    )
    parser.add_argument(
        "--request-distribution",
        default="constant",
        choices=["constant", "poisson"],
        help="With --request-rate-range: distribution of the intervals between requests.",
    )


def _add_windows(parser: Parser) -> None:
    add = parser.group("windows").add_argument
    add(
        "-p",
        "--measurement-interval",
        type=float,
        default=5000,
        metavar="MILLISECONDS",
        help="Length of a window.",
    )
    add(
        "--measurement-mode",
        default="time_windows",
        choices=["time_windows", "count_windows"],
        help="Measure windows of time, or of --measurement-request-count requests.",
    )
    add(
        "--measurement-request-count",
        type=int,
        default=50,
        metavar="REQUESTS",
        help="With count_windows: requests per window.",
    )
    add(
        "-s",
        "--stability-percentage",
        type=float,
        default=10,
        metavar="PERCENT",
        help="Measure until three windows differ from their mean by at most this.",
    )
    add("-r", "--max-trials", type=int, default=10, help="Maximum number of windows.")


def _add_measurement(parser: Parser) -> None:
    add = parser.group("measurement").add_argument
    add(
        "--percentile",
        type=int,
        choices=range(1, 100),
        metavar="1-99",
        help="Report this percentile of the latency (default: the mean).",
    )
    add(
        "-l",
        "--latency-threshold",
        type=float,
        default=0,
        metavar="MILLISECONDS",
        help="Measure no further level above this latency; 0: no limit.",
    )
    add(
        "--request-count",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="Send this many requests per level; 0: measure in windows.",
    )
    add(
        "--warmup-request-count",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="Requests before each level that are not measured.",
    )


def _add_files(parser: Parser) -> None:
    add = parser.group("files").add_argument
    add("-f", "--latency-report-file", type=Path, metavar="FILE", help="Write the levels as CSV.")
    add(
        "--profile-export-file",
        type=Path,
        metavar="FILE",
        help="Write the times of every request of the last level as JSON.",
    )


def run(given: Namespace) -> int:
    if given.streaming and given.protocol != "grpc":
        raise CommandError("--streaming needs -i grpc")
    settings = _settings(given)
    with connected(given) as connection:
        requests = _requests(given, connection)
        _print_settings(given)
        levels = list(_measure_levels(given, connection, requests, settings))
    if given.latency_report_file is not None:
        write_whole(given.latency_report_file, csv_table(levels, settings))
    print(f"Inferences/Second vs. Client {settings.latency_name} Batch Latency")
    for level in levels:
        print(
            f"{settings.level_name}: {level.value:g}, "
            f"throughput: {level.inferences_per_second:g} infer/sec, "
            f"latency {level.latency_us:.0f} usec"
        )
    return 0


def _settings(given: Namespace) -> LoadSettings:
    count = given.request_count
    if given.measurement_mode == "count_windows" and not count:
        count = given.measurement_request_count
    windows = WindowRule(
        given.measurement_interval / 1000, given.stability_percentage / 100, given.max_trials
    )
    return LoadSettings(
        given.model_name,
        given.batch_size,
        windows,
        count,
        given.warmup_request_count,
        given.streaming,
        by_rate=given.request_rate_range is not None,
        poisson=given.request_distribution == "poisson",
        percentile=given.percentile,
    )


def _requests(given: Namespace, connection: Connection) -> list[Request]:
    config = connection.config(given.model_name)
    max_batch_size = int(config.get("max_batch_size", 0))
    if given.batch_size < 1 or given.batch_size > max(1, max_batch_size):
        raise CommandError(
            f"-b {given.batch_size}: the model takes batches of 1 to {max(1, max_batch_size)}"
        )
    tensors = input_tensors(config, dict(_shape(text) for text in given.shape))
    if given.input_data in ("zero", "random"):
        random = given.input_data == "random"
        rows = [generate_row(tensors, random, given.string_data, given.string_length)]
    else:
        rows = read_rows(Path(given.input_data), tensors)
    inputs = batch_rows(rows, given.batch_size if max_batch_size else 0)
    return [
        Request(given.model_name, one, request_id=str(number)) for number, one in enumerate(inputs)
    ]


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    try:
        return name, tuple(int(dim) for dim in dims.split(","))
    except ValueError:
        raise CommandError(f"--shape takes NAME:DIM,DIM,…, not '{text}'") from None


def _print_settings(given: Namespace) -> None:
    print("*** Measurement Settings ***")
    print(f"  Batch size: {given.batch_size}")
    print("  Service Kind: TRITON")
    if given.request_count:
        print(f"  Sending a total of {given.request_count} requests")
    else:
        print(f'  Using "{given.measurement_mode}" mode for stabilization')
        print(f"  Measurement window: {given.measurement_interval:g} msec")
    latency = f"p{given.percentile}" if given.percentile else "average"
    print(f"  Stabilizing using {latency} latency\n", flush=True)


def _measure_levels(
    given: Namespace, connection: Connection, requests: list[Request], settings: LoadSettings
) -> Iterator[Level]:
    for value in parse_levels(given.request_rate_range or given.concurrency_range):
        level = measure_level(connection, requests, settings, value)
        print("\n".join([*level_lines(level, settings), ""]), flush=True)
        if given.profile_export_file is not None:
            mode = "request_rate" if settings.by_rate else "concurrency"
            write_whole(given.profile_export_file, profile_export(level.measured, mode, value))
        yield level
        if given.latency_threshold and level.latency_us > given.latency_threshold * 1000:
            limit = f"{given.latency_threshold:g} msec"
            print(f"The latency is over {limit}: no further level is measured")
            return
