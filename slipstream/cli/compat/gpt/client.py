"""The old tools/gpt/client.py: sends one prompt to the engine model of the gpt repository."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import numpy

from slipstream.cli.arguments import NO_EFFECT, Parser
from slipstream.cli.compat.client_flags import DEFAULT_TEXT
from slipstream.cli.compat.request_flags import add_gpt_sampling
from slipstream.cli.connections import add_connection, connected
from slipstream.client.connection import Request
from slipstream.client.token_request import as_declared, gpt_inputs
from slipstream.server.text.tokenizer import Tokenizer


def create_parser() -> Parser:
    parser = Parser("client.py", "Send a prompt to the engine model of a gpt repository.")
    add_connection(parser)
    parser.add_argument("-t", "--text", default=DEFAULT_TEXT, help="Prompt.")
    parser.add_argument(
        "--tokenizer_dir",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="Folder of the tokenizer.",
    )
    add_gpt_sampling(parser)
    ignored = parser.no_effect_group()
    ignored.add_argument("-c", "--concurrency", type=int, default=1, help=NO_EFFECT)
    ignored.add_argument("--tokenizer_type", default="auto", help=NO_EFFECT)
    return parser


def run(given: Namespace) -> int:
    tokenizer = Tokenizer.load(given.tokenizer_dir)
    prompt = tokenizer.encode(given.text)
    end = tokenizer.eos_id if tokenizer.eos_id is not None else 0
    tokens = numpy.array([prompt], dtype=numpy.int32)
    inputs = gpt_inputs(
        tokens, given.output_len, given.beam_width, given.topk, given.topp, pad_id=end, end_id=end
    )
    started = time.monotonic()
    with connected(given) as connection:
        declared = connection.input_types("tensorrt_llm")
        answer = connection.infer(Request("tensorrt_llm", as_declared(inputs, declared)))
    print(f"[INFO] Latency: {(time.monotonic() - started) * 1000:.3f} ms")
    ids = [int(token) for token in answer.outputs["output_ids"].reshape(-1)]
    if ids[: len(prompt)] == prompt:
        ids = ids[len(prompt) :]
    print(f"Input: {given.text}")
    print(f"Output: {tokenizer.decode(ids)}")
    return 0
