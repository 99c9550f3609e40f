"""The old benchmark_core_model.py: load on an engine model, and its table. Options stand before or
after the kind.
"""

from __future__ import annotations

import threading
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy

from slipstream.bench.classic_files import TRACE_NAME, append_row, differing, write_trace
from slipstream.bench.classic_table import Sample, core_model_rows, table_text
from slipstream.bench.prompts import (
    HISTOGRAMS,
    Work,
    delays,
    from_dataset,
    histogram_work,
    random_work,
    read_dataset,
)
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Connection, GrpcConnection, Request, ServerError
from slipstream.client.token_request import as_declared, scalar
from slipstream.server.text.tokenizer import Tokenizer

_WARM_UPS, _WARM_UP_LENGTH = 10, 100
_KINDS = {
    "dataset": ["dataset"],
    "token-norm-dist": ["token_norm_dist"],
    "token-from-histogram": ["token_from_histogram"],
}
SHARED: dict[str, dict[str, Any]] = {
    "--max-input-len": {"type": int, "help": "Leave out longer prompts."},
    "--request-rate": {
        "type": float,
        "default": -1.0,
        "help": "Requests a second; -1: all at once.",
    },
    "--time-delay-dist": {
        "default": "exponential_dist",
        "choices": ["constant", "exponential_dist"],
        "help": "How the times between requests differ.",
    },
    "--num-requests": {"type": int, "default": 30000, "help": "How many requests."},
    "--op-stats-csv": {"type": Path, "help": "Append a row of figures."},
    "--dump-perfetto-trace": {
        "action": "store_true",
        "help": f"Write {TRACE_NAME}, which Perfetto shows.",
    },
    "--exclude-input-in-output": {
        "action": "store_true",
        "help": "The server leaves the prompt out of its answers.",
    },
    "--tensorrt-llm-model-name": {
        "action": "append",
        "help": "The engine model; given again: all of them in turn.",
    },
    "--decoupled": {
        "action": "store_true",
        "help": "Ask over the gRPC stream, as a decoupled model needs it.",
    },
    "--check-perf-json": {"type": Path, "help": "Figures to compare with: {key: {figure: value}}."},
    "--check-perf-key": {"default": "", "help": "Which of them."},
    "--check-perf-atol": {"type": float, "default": 50.0, "help": "How far a figure may be off."},
    "--check-perf-rtol": {
        "type": float,
        "default": 0.05,
        "help": "And how far beyond that, as a share of it.",
    },
}


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    given.tensorrt_llm_model_name = given.tensorrt_llm_model_name or ["tensorrt_llm"]
    if given.decoupled and given.protocol != "grpc":
        raise CommandError("--decoupled needs -i grpc: a stream is a thing of gRPC")
    return measure(given, work_of(given))


def measure(given: Namespace, work: list[Work]) -> int:
    """Send the work and print what came of it."""
    if not work:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    connection = open_connection(given)
    try:
        given.declared = {
            name: connection.input_types(name) for name in given.tensorrt_llm_model_name
        }
        print("[INFO] Warm up for benchmarking.", flush=True)
        for number in range(_WARM_UPS):
            _send(given, connection, Work(work[0].tokens, _WARM_UP_LENGTH), number)
        print(f"[INFO] Start benchmarking on {len(work)} prompts.", flush=True)
        samples = _samples(given, connection, work)
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    return _report(given, samples)


def _report(given: Namespace, samples: list[Sample]) -> int:
    total = max(sample.answered for sample in samples) - min(sample.sent for sample in samples)
    print(f"[INFO] Total Latency: {total * 1000:.3f} ms")
    print(f"[INFO] Total request latencies: {sum(sample.latency_ms for sample in samples)} ms")
    rows = core_model_rows(samples)
    print(
        table_text(("Stat", "Value"), [row for row in rows if row[0] != "Avg. InFlight requests"])
    )
    if given.op_stats_csv is not None:
        append_row(given.op_stats_csv, rows)
    if given.dump_perfetto_trace:
        write_trace(Path(TRACE_NAME), samples)
    if given.check_perf_json is not None:
        wrong = differing(
            given.check_perf_json,
            given.check_perf_key,
            rows,
            given.check_perf_atol,
            given.check_perf_rtol,
        )
        for line in wrong:
            print(f"[ERROR] {line}")
        return 1 if wrong else 0
    return 0


def _parser() -> Parser:
    parser = Parser(
        "benchmark_core_model.py", description="Send load to an engine model and print a table."
    )
    add_connection(parser)
    add_shared(parser)
    kinds = parser.add_subparsers(dest="workload", required=True)
    for kind, aliases in _KINDS.items():
        child = kinds.add_parser(kind, aliases=aliases)
        for name, options in SHARED.items():
            child.add_argument(name, **{**options, "default": SUPPRESS})
        if kind == "dataset":
            add_dataset(child)
        elif kind == "token-from-histogram":
            child.add_argument(
                "--histogram-key", default="example", choices=sorted(HISTOGRAMS), help="Which one."
            )
        else:
            for name in ("--input-mean", "--input-stdev", "--output-mean", "--output-stdev"):
                child.add_argument(
                    name, type=float, required=True, help="Of the numbers of tokens."
                )
    return parser


def add_shared(parser: Parser) -> None:
    parser.add_argument(
        "-c", "--concurrency", type=int, default=128, help="Requests in flight at most."
    )
    parser.add_argument(
        "-t",
        "--stream-timeout",
        type=float,
        help="Seconds that an answer may take, with --decoupled.",
    )
    for name, options in SHARED.items():
        parser.add_argument(name, **options)


def add_dataset(parser: Any) -> None:
    parser.add_argument(
        "--dataset", type=Path, required=True, help="A JSON list: input, instruction and output."
    )
    parser.add_argument("--tokenizer-dir", type=Path, required=True, help="The tokenizer's folder.")
    parser.add_argument(
        "--tokenizer-type", default="auto", help="No effect: its files say what it is."
    )
    parser.add_argument(
        "--op-tokens-per-word", type=float, default=1.3, help="How long an answer is asked for."
    )


def work_of(given: Namespace) -> list[Work]:
    generator = numpy.random.default_rng(0)
    if given.workload == "dataset":
        encode = Tokenizer.load(given.tokenizer_dir).encode
        items = read_dataset(given.dataset)[: given.num_requests]
        return list(from_dataset(items, encode, given.op_tokens_per_word, given.max_input_len))
    if given.workload.replace("_", "-") == "token-from-histogram":
        return list(
            histogram_work(given.num_requests, given.histogram_key, given.max_input_len, generator)
        )
    return list(
        random_work(
            given.num_requests,
            (given.input_mean, given.input_stdev),
            (given.output_mean, given.output_stdev),
            generator,
        )
    )


def _samples(given: Namespace, connection: Connection, work: list[Work]) -> list[Sample]:
    waits = delays(
        len(work), given.request_rate, given.time_delay_dist, numpy.random.default_rng(1)
    )
    with ThreadPoolExecutor(given.concurrency) as pool:
        pending = []
        for number, (one, wait) in enumerate(zip(work, waits, strict=True)):
            threading.Event().wait(wait)
            pending.append(pool.submit(_send, given, connection, one, number, time.monotonic()))
        return [future.result() for future in pending]


def _send(
    given: Namespace, connection: Connection, work: Work, number: int, sent: float | None = None
) -> Sample:
    sent = time.monotonic() if sent is None else sent
    model = given.tensorrt_llm_model_name[number % len(given.tensorrt_llm_model_name)]
    inputs = {
        "input_ids": numpy.array([work.tokens], dtype=numpy.int32),
        "input_lengths": scalar(len(work.tokens)),
        "request_output_len": scalar(work.output_length),
        "end_id": scalar(-1),
    }
    request = Request(model, as_declared(inputs, given.declared[model]), request_id=str(number))
    if given.decoupled:
        assert isinstance(connection, GrpcConnection)
        answers = [
            answer
            for answer in connection.stream([request], given.stream_timeout)
            if answer.outputs
        ]
    else:
        answers = [connection.infer(request)]
    ids = sum(answer.outputs["output_ids"].shape[2] for answer in answers)
    echoed = 0 if given.exclude_input_in_output or ids < len(work.tokens) else len(work.tokens)
    return Sample(sent, time.monotonic(), len(work.tokens), ids - echoed)
