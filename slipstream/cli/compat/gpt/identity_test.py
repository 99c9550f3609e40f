"""The old tools/gpt/identity_test.py (later benchmark_core_model.py): times random batches."""

from __future__ import annotations

import time
from argparse import Namespace

import numpy

from slipstream.cli.arguments import NO_EFFECT, Parser
from slipstream.cli.compat.gpt.gen_input_data import TOKEN_LIMIT
from slipstream.cli.compat.request_flags import add_gpt_sampling
from slipstream.cli.connections import add_connection, connected
from slipstream.client.connection import Request
from slipstream.client.token_request import as_declared, gpt_inputs


def create_parser() -> Parser:
    parser = Parser("identity_test.py", "Time batches of random tokens on a gpt repository.")
    add_connection(parser)
    parser.add_argument(
        "-w", "--warm_up", action="store_true", help="Send one request first that is not timed."
    )
    parser.add_argument(
        "-p", "--request_parallelism", type=int, default=10, help="Number of requests per run."
    )
    parser.add_argument(
        "-b", "--batch_size", type=int, default=8, help="Number of prompts in a request."
    )
    add_gpt_sampling(parser)
    parser.add_argument(
        "-s", "--start_len", type=int, default=8, metavar="TOKENS", help="Length of the prompts."
    )
    parser.add_argument("-n", "--num_runs", type=int, default=1, help="Number of runs.")
    ignored = parser.no_effect_group()
    ignored.add_argument("-c", "--concurrency", type=int, default=1, help=NO_EFFECT)
    ignored.add_argument("-m", "--mode", default="sync", choices=["sync", "async"], help=NO_EFFECT)
    return parser


def run(given: Namespace) -> int:
    generator = numpy.random.default_rng(0)
    tokens = generator.integers(
        0, TOKEN_LIMIT, (given.batch_size, given.start_len), dtype=numpy.int32
    )
    inputs = gpt_inputs(
        tokens, given.output_len, given.beam_width, given.topk, given.topp, pad_id=0, end_id=2
    )
    latencies = []
    with connected(given) as connection:
        inputs = as_declared(inputs, connection.input_types("tensorrt_llm"))
        for number in range(int(given.warm_up) + given.num_runs * given.request_parallelism):
            started = time.monotonic()
            connection.infer(Request("tensorrt_llm", inputs))
            if number or not given.warm_up:
                latencies.append((time.monotonic() - started) * 1000)
    latency = sum(latencies) / len(latencies)
    lengths = f"Start len: {given.start_len}, Output len: {given.output_len}"
    print(f"[INFO] Batch size: {given.batch_size}, {lengths}")
    print(f"[INFO] Latency: {latency:.3f} ms")
    print(f"[INFO] Throughput: {given.batch_size / latency * 1000:.3f} sentences / sec")
    return 0
