"""The old tools/gpt/client.py: one prompt to the engine model of the gpt repository."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.client_flags import DEFAULT_TEXT
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Request, ServerError
from slipstream.client.tensors import Array
from slipstream.client.token_request import as_declared, scalar
from slipstream.server.text.tokenizer import Tokenizer


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "client.py", description="Send a prompt to the engine model of a gpt repository."
    )
    add_connection(parser)
    parser.add_argument("-t", "--text", default=DEFAULT_TEXT, help="The prompt.")
    parser.add_argument("-c", "--concurrency", type=int, default=1, help="No effect.")
    add_sampling(parser)
    parser.add_argument("-o", "--output_len", type=int, default=10, help="Tokens to ask for.")
    parser.add_argument("--tokenizer_dir", type=Path, required=True, help="The tokenizer's folder.")
    parser.add_argument("--tokenizer_type", default="auto", help="No effect.")
    given = parser.parse(arguments)
    tokenizer = Tokenizer.load(given.tokenizer_dir)
    prompt = tokenizer.encode(given.text)
    end = tokenizer.eos_id if tokenizer.eos_id is not None else 0
    tokens = numpy.array([prompt], dtype=numpy.int32)
    inputs = gpt_inputs(
        tokens, given.output_len, given.beam_width, given.topk, given.topp, pad_id=end, end_id=end
    )
    connection = open_connection(given)
    started = time.monotonic()
    try:
        declared = connection.input_types("tensorrt_llm")
        answer = connection.infer(Request("tensorrt_llm", as_declared(inputs, declared)))
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    print(f"[INFO] Latency: {(time.monotonic() - started) * 1000:.3f} ms")
    ids = [int(token) for token in answer.outputs["output_ids"].reshape(-1)]
    print(f"Input: {given.text}")
    print(
        f"Output: {tokenizer.decode(ids[len(prompt) :] if ids[: len(prompt)] == prompt else ids)}"
    )
    return 0


def add_sampling(parser: Parser) -> None:
    parser.add_argument(
        "-beam", "--beam_width", type=int, default=1, help="How many answers a beam search keeps."
    )
    parser.add_argument(
        "-topk", "--topk", type=int, default=1, help="Choose among so many tokens; 1 is greedy."
    )
    parser.add_argument(
        "-topp", "--topp", type=float, default=0.0, help="Choose among the likeliest of this share."
    )


def gpt_inputs(
    tokens: Array,
    output_length: int,
    beam_width: int,
    top_k: int,
    top_p: float,
    pad_id: int,
    end_id: int,
) -> dict[str, Array]:
    """tokens: [batch, length] → the tensors that the gpt repository's engine model was always sent."""
    batch = tokens.shape[0]
    scalars = {
        "input_lengths": tokens.shape[1],
        "request_output_len": output_length,
        "pad_id": pad_id,
        "end_id": end_id,
        "beam_width": beam_width,
        "temperature": 1.0,
        "runtime_top_k": top_k,
        "runtime_top_p": top_p,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "min_length": 1,
        "presence_penalty": 0.0,
    }
    inputs = {"input_ids": tokens.astype(numpy.int32)}
    inputs |= {name: numpy.repeat(scalar(value), batch, axis=0) for name, value in scalars.items()}
    inputs["random_seed"] = numpy.zeros((batch, 1), dtype=numpy.uint64)
    return inputs
