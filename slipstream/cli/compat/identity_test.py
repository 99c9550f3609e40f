"""The old tools/inflight_batcher_llm/identity_test.py, from before there was a
benchmark_core_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.benchmark_core_model import add_dataset, add_shared, measure, work_of
from slipstream.cli.connections import add_connection


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "identity_test.py",
        description="Send the prompts of a dataset to an engine model, and time them.",
    )
    add_connection(parser)
    add_shared(parser)
    add_dataset(parser)
    parser.add_argument(
        "--time_bet_reqs",
        type=float,
        nargs="+",
        default=[0.0],
        help="Milliseconds between two requests; several make a run each.",
    )
    given = parser.parse(arguments)
    given.workload = "dataset"
    given.tensorrt_llm_model_name = given.tensorrt_llm_model_name or ["tensorrt_llm"]
    if given.decoupled and given.protocol != "grpc":
        raise CommandError("--decoupled needs -i grpc: a stream is a thing of gRPC")
    work = work_of(given)
    for milliseconds in given.time_bet_reqs:
        if milliseconds:
            given.request_rate, given.time_delay_dist = 1000 / milliseconds, "constant"
        if code := measure(given, work):
            return code
    return 0
