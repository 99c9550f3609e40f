"""The old tools/gpt/identity_test.py (later benchmark_core_model.py): batches of random tokens,
timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.gpt_client import add_sampling, gpt_inputs
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Request, ServerError
from slipstream.client.token_request import as_declared

_TOKEN_LIMIT = 50255  # of GPT-2; what is beyond a smaller vocabulary the server brings back into it


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "identity_test.py", description="Time batches of random tokens on a gpt repository."
    )
    add_connection(parser)
    parser.add_argument(
        "-w", "--warm_up", action="store_true", help="Send one request first that does not count."
    )
    parser.add_argument("-c", "--concurrency", type=int, default=1, help="No effect.")
    parser.add_argument("-p", "--request_parallelism", type=int, default=10, help="Requests a run.")
    parser.add_argument(
        "-m", "--mode", default="sync", choices=["sync", "async"], help="No effect."
    )
    parser.add_argument("-b", "--batch_size", type=int, default=8, help="Prompts in a request.")
    add_sampling(parser)
    parser.add_argument("-s", "--start_len", type=int, default=8, help="Tokens of a prompt.")
    parser.add_argument("-o", "--output_len", type=int, default=10, help="Tokens to ask for.")
    parser.add_argument("-n", "--num_runs", type=int, default=1, help="How often to do it all.")
    given = parser.parse(arguments)
    generator = numpy.random.default_rng(0)
    tokens = generator.integers(
        0, _TOKEN_LIMIT, (given.batch_size, given.start_len), dtype=numpy.int32
    )
    inputs = gpt_inputs(
        tokens, given.output_len, given.beam_width, given.topk, given.topp, pad_id=0, end_id=2
    )
    connection = open_connection(given)
    latencies = []
    try:
        inputs = as_declared(inputs, connection.input_types("tensorrt_llm"))
        for number in range(int(given.warm_up) + given.num_runs * given.request_parallelism):
            started = time.monotonic()
            connection.infer(Request("tensorrt_llm", inputs))
            if number or not given.warm_up:
                latencies.append((time.monotonic() - started) * 1000)
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    latency = sum(latencies) / len(latencies)
    print(
        f"[INFO] Batch size: {given.batch_size}, Start len: {given.start_len}, Output len: {given.output_len}"
    )
    print(f"[INFO] Latency: {latency:.3f} ms")
    print(f"[INFO] Throughput: {given.batch_size / latency * 1000:.3f} sentences / sec")
    return 0
