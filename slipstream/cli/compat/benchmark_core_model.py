"""The old benchmark_core_model.py: load on an engine model, and a table of figures."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy

from slipstream.bench.core_model import CoreModelClient, CoreModelLoad
from slipstream.bench.core_model_report import (
    TRACE_NAME,
    Sample,
    append_row,
    core_model_rows,
    find_differences,
    table_text,
    write_trace,
)
from slipstream.bench.prompts import (
    HISTOGRAMS,
    TokenPrompt,
    dataset_prompts,
    histogram_prompts,
    random_prompts,
    read_dataset,
)
from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.cli.connections import add_connection, connected
from slipstream.server.text.tokenizer import Tokenizer

# workload: the options that it requires
_WORKLOADS: dict[str, tuple[str, ...]] = {
    "dataset": ("dataset", "tokenizer_dir"),
    "token-norm-dist": ("input_mean", "input_stdev", "output_mean", "output_stdev"),
    "token-from-histogram": (),
}


def create_parser() -> Parser:
    parser = Parser("benchmark_core_model.py", "Send load to an engine model and print a table.")
    parser.add_argument(
        "workload",
        type=lambda text: text.replace("_", "-"),
        choices=list(_WORKLOADS),
        help="Kind of prompts: a dataset, or random tokens with lengths of a distribution.",
    )
    add_connection(parser)
    add_load(parser)
    add_dataset(parser)
    group = parser.group("token-norm-dist")
    for name in ("input", "output"):
        for figure, text in (("mean", "Mean"), ("stdev", "Standard deviation")):
            group.add_argument(
                f"--{name}-{figure}",
                type=float,
                metavar="TOKENS",
                help=f"{text} of the {name} lengths.",
            )
    group = parser.group("token-from-histogram")
    group.add_argument(
        "--histogram-key",
        default="example",
        choices=sorted(HISTOGRAMS),
        help="Histogram of the lengths.",
    )
    add_tokenizer_type(parser)
    return parser


def add_load(parser: Parser) -> None:
    """Add the options that do not depend on the kind of prompts."""
    _add_rate(parser)
    _add_model(parser)
    _add_report(parser)


def _add_rate(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "-c",
        "--concurrency",
        type=int,
        default=128,
        metavar="REQUESTS",
        help="Maximum number of requests in flight.",
    )
    add(
        "--request-rate",
        type=float,
        default=-1.0,
        metavar="RATE",
        help="Requests a second; -1: without delays.",
    )
    add(
        "--time-delay-dist",
        default="exponential_dist",
        choices=["constant", "exponential_dist"],
        help="Distribution of the delays between requests.",
    )
    add("--num-requests", type=int, default=30000, metavar="N", help="Number of requests.")
    add(
        "--max-input-len",
        type=int,
        metavar="TOKENS",
        help="Leave out longer prompts (default: no limit).",
    )


def _add_model(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--tensorrt-llm-model-name",
        action="append",
        metavar="MODEL",
        help="Engine model; can be repeated, to use several in turn (default: tensorrt_llm).",
    )
    add(
        "--decoupled",
        action="store_true",
        help="Use the gRPC stream, which a decoupled model needs.",
    )
    add(
        "-t",
        "--stream-timeout",
        type=float,
        metavar="SECONDS",
        help="With --decoupled: fail if an answer takes longer (default: no limit).",
    )
    add(
        "--exclude-input-in-output",
        action="store_true",
        help="Count tokens for a server that leaves the prompt out of its answers.",
    )


def _add_report(parser: Parser) -> None:
    add = parser.group("report").add_argument
    add("--op-stats-csv", type=Path, metavar="FILE", help="Append the figures to a CSV file.")
    add(
        "--dump-perfetto-trace",
        action="store_true",
        help=f"Write the requests to {TRACE_NAME}, for Perfetto.",
    )
    add(
        "--check-perf-json",
        type=Path,
        metavar="FILE",
        help="Compare with figures of a JSON file {key: {figure: value}}.",
    )
    add("--check-perf-key", default="", metavar="KEY", help="Key in --check-perf-json.")
    add(
        "--check-perf-atol",
        type=float,
        default=50.0,
        metavar="TOLERANCE",
        help="Absolute tolerance of --check-perf-json.",
    )
    add(
        "--check-perf-rtol",
        type=float,
        default=0.05,
        metavar="TOLERANCE",
        help="Relative tolerance of --check-perf-json, added to the absolute one.",
    )


def add_dataset(parser: Parser, required: bool = False) -> None:
    add = parser.group("dataset").add_argument
    add(
        "--dataset",
        type=Path,
        required=required,
        metavar="FILE",
        help="JSON list of objects with input, instruction and output.",
    )
    add(
        "--tokenizer-dir",
        type=Path,
        required=required,
        metavar="FOLDER",
        help="Folder of the tokenizer.",
    )
    add(
        "--op-tokens-per-word",
        type=float,
        default=1.3,
        metavar="TOKENS",
        help="Tokens to ask for per word of the dataset's output.",
    )


def add_tokenizer_type(parser: Parser) -> None:
    parser.no_effect_group().add_argument(
        "--tokenizer-type", default="auto", help="The type is read from the tokenizer's files."
    )


def run(given: Namespace) -> int:
    missing = [name for name in _WORKLOADS[given.workload] if getattr(given, name) is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UsageError(f"{given.workload} requires {names}")
    return measure(given, create_prompts(given))


def measure(given: Namespace, prompts: list[TokenPrompt]) -> int:
    """Send the prompts, print the figures and return the exit code."""
    if given.decoupled and given.protocol != "grpc":
        raise CommandError("--decoupled needs -i grpc, the only protocol with streams")
    if not prompts:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    load = CoreModelLoad(
        given.tensorrt_llm_model_name or ["tensorrt_llm"],
        given.concurrency,
        given.request_rate,
        given.time_delay_dist,
        given.decoupled,
        given.stream_timeout,
        answers_hold_prompt=not given.exclude_input_in_output,
    )
    with connected(given) as connection:
        client = CoreModelClient(connection, load)
        print("[INFO] Warm up for benchmarking.", flush=True)
        client.warm_up(prompts[0])
        print(f"[INFO] Start benchmarking on {len(prompts)} prompts.", flush=True)
        samples = client.measure(prompts)
    return _report(given, samples)


def create_prompts(given: Namespace) -> list[TokenPrompt]:
    generator = numpy.random.default_rng(0)
    if given.workload == "dataset":
        encode = Tokenizer.load(given.tokenizer_dir).encode
        items = read_dataset(given.dataset)[: given.num_requests]
        return list(dataset_prompts(items, encode, given.op_tokens_per_word, given.max_input_len))
    if given.workload == "token-from-histogram":
        key = given.histogram_key
        return list(histogram_prompts(given.num_requests, key, given.max_input_len, generator))
    lengths = (given.input_mean, given.input_stdev)
    outputs = (given.output_mean, given.output_stdev)
    return list(random_prompts(given.num_requests, lengths, outputs, generator))


def _report(given: Namespace, samples: list[Sample]) -> int:
    total = max(sample.answered for sample in samples) - min(sample.sent for sample in samples)
    print(f"[INFO] Total Latency: {total * 1000:.3f} ms")
    print(f"[INFO] Total request latencies: {sum(sample.latency_ms for sample in samples)} ms")
    rows = core_model_rows(samples)
    shown = [row for row in rows if row[0] != "Avg. InFlight requests"]
    print(table_text(("Stat", "Value"), shown))
    if given.op_stats_csv is not None:
        append_row(given.op_stats_csv, rows)
    if given.dump_perfetto_trace:
        write_trace(Path(TRACE_NAME), samples)
    if given.check_perf_json is None:
        return 0
    differences = find_differences(
        given.check_perf_json,
        given.check_perf_key,
        rows,
        given.check_perf_atol,
        given.check_perf_rtol,
    )
    for line in differences:
        print(f"[ERROR] {line}")
    return 1 if differences else 0
