"""The old benchmark_core_model.py: load on an engine model, and its table. Options stand before or after the kind."""

from __future__ import annotations

import csv
import threading
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy

from slipstream.bench.classic_table import Sample, core_model_rows, table_text
from slipstream.bench.prompts import Work, delays, from_dataset, random_work, read_dataset
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.token_request import as_declared, scalar
from slipstream.server.text.tokenizer import Tokenizer

_WARM_UPS, _WARM_UP_LENGTH = 10, 100
_KINDS = {"dataset": ["dataset"], "token-norm-dist": ["token_norm_dist"]}
_SHARED: dict[str, dict[str, Any]] = {
    "--max-input-len": {"type": int, "help": "Leave out longer prompts."},
    "--request-rate": {"type": float, "default": -1.0, "help": "Requests a second; -1: all at once."},
    "--time-delay-dist": {"default": "exponential_dist", "choices": ["constant", "exponential_dist"]},
    "--num-requests": {"type": int, "default": 30000},
    "--op-stats-csv": {"type": Path, "help": "Append a row of figures."},
    "--exclude-input-in-output": {"action": "store_true"},
    "--tensorrt-llm-model-name": {"default": "tensorrt_llm"},
}


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    given = parser.parse(arguments)
    work = _work(given)
    if not work:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    connection = open_connection(given)
    try:
        given.declared = connection.input_types(given.tensorrt_llm_model_name)
        print("[INFO] Warm up for benchmarking.", flush=True)
        for number in range(_WARM_UPS):
            _send(given, connection, Work(work[0].tokens, _WARM_UP_LENGTH), str(number))
        print(f"[INFO] Start benchmarking on {len(work)} prompts.", flush=True)
        samples = _measure(given, connection, work)
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    total = max(sample.answered for sample in samples) - min(sample.sent for sample in samples)
    print(f"[INFO] Total Latency: {total * 1000:.3f} ms")
    print(f"[INFO] Total request latencies: {sum(sample.latency_ms for sample in samples)} ms")
    rows = core_model_rows(samples)
    print(table_text(("Stat", "Value"), [row for row in rows if row[0] != "Avg. InFlight requests"]))
    if given.op_stats_csv is not None:
        _append_row(given.op_stats_csv, rows)
    return 0


def _parser() -> Parser:
    parser = Parser("benchmark_core_model.py", description="Send load to an engine model and print a table.")
    add_connection(parser)
    parser.add_argument("-c", "--concurrency", type=int, default=128, help="Requests in flight at most.")
    for name, options in _SHARED.items():
        parser.add_argument(name, **options)
    kinds = parser.add_subparsers(dest="workload", required=True)
    for kind, aliases in _KINDS.items():
        child = kinds.add_parser(kind, aliases=aliases)
        for name, options in _SHARED.items():
            child.add_argument(name, **{**options, "default": SUPPRESS})
        if kind == "dataset":
            child.add_argument("--dataset", type=Path, required=True)
            child.add_argument("--tokenizer-dir", type=Path, required=True)
            child.add_argument("--tokenizer-type", default="auto", help="No effect.")
            child.add_argument("--op-tokens-per-word", type=float, default=1.3)
        else:
            for name in ("--input-mean", "--input-stdev", "--output-mean", "--output-stdev"):
                child.add_argument(name, type=float, required=True)
    return parser


def _work(given: Namespace) -> list[Work]:
    if given.workload == "dataset":
        encode = Tokenizer.load(given.tokenizer_dir).encode
        items = read_dataset(given.dataset)[: given.num_requests]
        return list(from_dataset(items, encode, given.op_tokens_per_word, given.max_input_len))
    generator = numpy.random.default_rng(0)
    return list(random_work(given.num_requests, (given.input_mean, given.input_stdev),
                            (given.output_mean, given.output_stdev), generator))


def _measure(given: Namespace, connection: Connection, work: list[Work]) -> list[Sample]:
    waits = delays(len(work), given.request_rate, given.time_delay_dist, numpy.random.default_rng(1))
    with ThreadPoolExecutor(given.concurrency) as pool:
        pending = []
        for number, (one, wait) in enumerate(zip(work, waits, strict=True)):
            threading.Event().wait(wait)
            pending.append(pool.submit(_send, given, connection, one, str(number), time.monotonic()))
        return [future.result() for future in pending]


def _send(given: Namespace, connection: Connection, work: Work, request_id: str, sent: float | None = None) -> Sample:
    sent = time.monotonic() if sent is None else sent
    inputs = {"input_ids": numpy.array([work.tokens], dtype=numpy.int32), "input_lengths": scalar(len(work.tokens)),
              "request_output_len": scalar(work.output_length), "end_id": scalar(-1)}
    inputs = as_declared(inputs, given.declared)
    answer = connection.infer(Request(given.tensorrt_llm_model_name, inputs, request_id=request_id))
    ids = answer.outputs["output_ids"].shape[2]
    echoed = 0 if given.exclude_input_in_output or ids < len(work.tokens) else len(work.tokens)
    return Sample(sent, time.monotonic(), len(work.tokens), ids - echoed)


def _append_row(path: Path, rows: list[tuple[str, str]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([name for name, _ in rows])
        writer.writerow([value for _, value in rows])
