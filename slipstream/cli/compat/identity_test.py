"""The old tools/inflight_batcher_llm/identity_test.py, which benchmark_core_model.py replaced."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.cli.compat.benchmark_core_model import (
    add_dataset,
    add_load,
    add_tokenizer_type,
    create_prompts,
    measure,
)
from slipstream.cli.connections import add_connection


def create_parser() -> Parser:
    parser = Parser(
        "identity_test.py", "Send the prompts of a dataset to an engine model and time them."
    )
    add_connection(parser)
    add_load(parser)
    add_dataset(parser, required=True)
    parser.add_argument(
        "--time_bet_reqs",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="MILLISECONDS",
        help="Time between two requests; several values: one run each (default: 0).",
    )
    add_tokenizer_type(parser)
    return parser


def run(given: Namespace) -> int:
    given.workload = "dataset"
    prompts = create_prompts(given)
    for milliseconds in given.time_bet_reqs:
        if milliseconds:
            given.request_rate = 1000 / milliseconds
            given.time_delay_dist = "constant"
        if code := measure(given, prompts):
            return code
    return 0
