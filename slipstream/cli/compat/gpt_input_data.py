"""The old tools/gpt/gen_input_data.py: requests for perf_analyzer, in input_data.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.arguments import Parser
from slipstream.cli.compat.gpt_client import add_sampling

_OUTPUT = Path("input_data.json")
_TOKEN_LIMIT = 50255


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gen_input_data.py", description=f"Write random requests to {_OUTPUT}.")
    parser.add_argument(
        "-b", "--batch_size", type=int, default=8, help="No effect: perf_analyzer's -b decides."
    )
    add_sampling(parser)
    parser.add_argument("-s", "--start_len", type=int, default=8, help="Tokens of a prompt.")
    parser.add_argument("-o", "--output_len", type=int, default=10, help="Tokens to ask for.")
    parser.add_argument("--num_samples", type=int, default=10000, help="How many requests.")
    given = parser.parse(arguments)
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
        tokens = generator.integers(0, _TOKEN_LIMIT, given.start_len).tolist()
        samples.append({"input_ids": {"content": tokens, "shape": [given.start_len]}, **fixed})
    _OUTPUT.write_text(json.dumps({"data": samples}))
    return 0
