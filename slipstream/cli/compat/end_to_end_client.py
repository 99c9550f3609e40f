"""The old end_to_end_grpc_client.py: sends text to a text model over a gRPC stream."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.compat.request_flags import (
    PENALTIES,
    SAMPLING,
    add_penalties,
    add_sampling,
    add_token_ids,
)
from slipstream.cli.connections import connect_grpc
from slipstream.client.connection import Answer, Request, ServerError
from slipstream.client.tensors import Array, scalar, text_list, texts
from slipstream.client.token_request import lora_arrays

_NUMBERS = (*SAMPLING, *PENALTIES, "end_id", "pad_id", "num_return_sequences")
# input tensor that asks for a further output: its description
_FURTHER_OUTPUTS = {
    "return_context_logits": "Ask for the logits of the prompt.",
    "return_generation_logits": "Ask for the logits of the generated tokens.",
    "return_log_probs": "Ask for log-probabilities.",
    "return_kv_cache_reuse_stats": "Ask for the statistics of KV cache reuse.",
    "exclude_input_in_output": "Ask for the answer without the prompt.",
}
# output tensor whose shape is printed: the input tensor that asks for it
_SHAPES = {
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
    "cum_log_probs": "return_log_probs",
    "output_log_probs": "return_log_probs",
}


def create_parser() -> Parser:
    parser = Parser(
        "end_to_end_grpc_client.py", "Send a prompt to a text model and print the answer."
    )
    add = parser.add_argument
    add("-p", "--prompt", required=True, nargs="+", help="Prompts.")
    add("--batch-inputs", action="store_true", help="Send all prompts in one request.")
    add(
        "-u",
        "--url",
        default="localhost:8001",
        metavar="HOST:PORT",
        help="gRPC address of the server.",
    )
    add("-i", "--protocol", default="grpc", choices=["grpc"], help="Protocol of the requests.")
    add("--model-name", default="ensemble", help="Name of the text model.")
    add("-S", "--streaming", action="store_true", help="Receive the text as it is generated.")
    add(
        "--overwrite-output-text",
        action="store_true",
        help="Print the last answer only, for models that send the whole text so far.",
    )
    add("--request-id", default="", metavar="ID", help="Id of the request.")
    _add_sampling(parser)
    for name, text in _FURTHER_OUTPUTS.items():
        add(f"--{name.replace('_', '-')}", action="store_true", help=text)
    add(
        "--expected-outputs",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="Texts that --check-outputs expects.",
    )
    add("--check-outputs", action="store_true", help="Exit with code 1 if the answers differ.")
    add_verbose(parser)
    return parser


def _add_sampling(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "-o",
        "--output-len",
        type=int,
        default=100,
        metavar="TOKENS",
        help="Maximum number of tokens to generate.",
    )
    add("-b", "--beam-width", type=int, default=1, help="Number of beams of a beam search.")
    add("-n", "--num-return-sequences", type=int, help="Number of answers to sample (default: 1).")
    add_sampling(parser)
    add_penalties(parser)
    add("--stop-words", nargs="+", default=[], metavar="TEXT", help="Texts that end the answer.")
    add("--bad-words", nargs="+", default=[], metavar="TEXT", help="Texts that are not generated.")
    add(
        "--embedding-bias-words",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="Words whose logits are changed.",
    )
    add(
        "--embedding-bias-weights",
        nargs="+",
        type=float,
        default=[],
        metavar="WEIGHT",
        help="Number to add to the logits of each of these words.",
    )
    add_token_ids(parser)
    add(
        "--lora-path",
        type=Path,
        metavar="FOLDER",
        help="LoRA adapter to send: a folder that slipstream lora wrote.",
    )
    add("--lora-task-id", type=int, metavar="ID", help="Id of the adapter in the server's cache.")


def run(given: Namespace) -> int:
    connection = connect_grpc(given.url)
    batches = [given.prompt] if given.batch_inputs else [[prompt] for prompt in given.prompt]
    printed: list[str] = []
    try:
        for prompts in batches:
            inputs = _inputs(given, prompts)
            request = Request(given.model_name, inputs, request_id=given.request_id)
            printed += _print_answers(given, list(connection.stream([request])))
    except ServerError as error:
        print(error)
        return 0  # as the old client did
    finally:
        connection.close()
    if given.check_outputs and printed != given.expected_outputs:
        print(f"expected {given.expected_outputs}, got {printed}")
        return 1
    return 0


def _inputs(given: Namespace, prompts: list[str]) -> dict[str, Array]:
    """Return the tensors of one request. All prompts have the same options."""
    optional: dict[str, Any] = {name: getattr(given, name) for name in _NUMBERS}
    optional |= {name: getattr(given, name) or None for name in _FURTHER_OUTPUTS}
    inputs = {
        "max_tokens": scalar(given.output_len),
        "stream": scalar(given.streaming),
        "beam_width": scalar(given.beam_width),
    }
    inputs |= {name: scalar(value) for name, value in optional.items() if value is not None}
    for name in ("stop_words", "bad_words", "embedding_bias_words"):
        if getattr(given, name):
            inputs[name] = texts(getattr(given, name))
    if given.embedding_bias_weights:
        inputs["embedding_bias_weights"] = numpy.array(
            [given.embedding_bias_weights], dtype=numpy.float32
        )
    inputs |= lora_arrays(given.lora_path, given.lora_task_id)
    batch = {name: numpy.repeat(array, len(prompts), axis=0) for name, array in inputs.items()}
    return {**batch, "text_input": texts(*([prompt] for prompt in prompts))}


def _print_answers(given: Namespace, answers: list[Answer]) -> list[str]:
    """Print the texts of the answers, and return them."""
    with_text = [answer.outputs for answer in answers if "text_output" in answer.outputs]
    pieces = [text_list(outputs["text_output"]) for outputs in with_text]
    if given.beam_width > 1 or (given.num_return_sequences or 1) > 1 or given.batch_inputs:
        printed = list(itertools.chain.from_iterable(pieces))
        print(printed)
        return printed
    parts = [piece[0] for piece in pieces if piece]
    if given.overwrite_output_text:
        parts = parts[-1:]
    text = "".join(parts)
    print(text)
    last = answers[-1].outputs if answers else {}
    for name, flag in _SHAPES.items():
        if getattr(given, flag) and name in last:
            print(f"{name}.shape: {last[name].shape}")
    return [text]
