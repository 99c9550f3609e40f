"""The old tools/gpt/gen_input_data.py: writes requests for perf_analyzer to input_data.json."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.arguments import Parser
from slipstream.cli.compat.request_flags import add_gpt_sampling

OUTPUT = Path("input_data.json")
TOKEN_LIMIT = 50255  # GPT-2's vocabulary; the server maps larger ids into a smaller vocabulary


def create_parser() -> Parser:
    parser = Parser("gen_input_data.py", f"Write random requests to {OUTPUT}.")
    add_gpt_sampling(parser)
    parser.add_argument(
        "-s", "--start_len", type=int, default=8, metavar="TOKENS", help="Length of the prompts."
    )
    parser.add_argument("--num_samples", type=int, default=10000, help="Number of requests.")
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "-b", "--batch_size", type=int, default=8, help="The -b of perf_analyzer decides."
    )
    return parser


def run(given: Namespace) -> int:
    generator = numpy.random.default_rng(0)
    scalars: dict[str, Any] = {
        "input_lengths": given.start_len,
        "request_output_len": given.output_len,
        "runtime_top_k": given.topk,
        "runtime_top_p": given.topp,
        "beam_search_diversity_rate": 0.0,
        "temperature": 1.0,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "random_seed": 0,
        "beam_width": given.beam_width,
    }
    fixed = {name: {"content": [value], "shape": [1]} for name, value in scalars.items()}
    samples = []
    for _ in range(given.num_samples):
        tokens = generator.integers(0, TOKEN_LIMIT, given.start_len).tolist()
        samples.append({"input_ids": {"content": tokens, "shape": [given.start_len]}, **fixed})
    OUTPUT.write_text(json.dumps({"data": samples}))
    return 0
