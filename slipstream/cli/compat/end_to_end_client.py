"""The old end_to_end_grpc_client.py: text to a text model over the gRPC stream."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.arguments import Parser
from slipstream.cli.connections import connect_grpc
from slipstream.client.connection import Answer, Request, ServerError
from slipstream.client.tensors import Array, texts
from slipstream.client.token_request import lora_arrays, scalar


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    connection = connect_grpc(given.url)
    rounds = [given.prompt] if given.batch_inputs else [[prompt] for prompt in given.prompt]
    shown: list[str] = []
    try:
        for prompts in rounds:
            request = Request(
                given.model_name, _inputs(given, prompts), request_id=given.request_id
            )
            shown += _show(given, list(connection.stream([request])))
    except ServerError as error:
        print(error)
        return 0  # as the old client did
    finally:
        connection.close()
    if given.check_outputs and shown != given.expected_outputs:
        print(f"expected {given.expected_outputs}, got {shown}")
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        "end_to_end_grpc_client.py",
        description="Send a prompt to a text model and print the answer.",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="No effect: all that comes back is printed."
    )
    parser.add_argument("-u", "--url", default="localhost:8001", help="The server's gRPC address.")
    parser.add_argument(
        "-i", "--protocol", default="grpc", choices=["grpc"], help="gRPC is the only one."
    )
    parser.add_argument("-p", "--prompt", required=True, nargs="+", help="The prompt, or several.")
    parser.add_argument(
        "--batch-inputs", action="store_true", help="Send all prompts in one request."
    )
    parser.add_argument(
        "--model-name", default="ensemble", help="ensemble, tensorrt_llm_bls or any text model."
    )
    parser.add_argument(
        "-S", "--streaming", action="store_true", help="Take the answer piece by piece."
    )
    parser.add_argument(
        "-b", "--beam-width", type=int, default=1, help="How many answers a beam search keeps."
    )
    parser.add_argument(
        "-n", "--num-return-sequences", type=int, help="How many answers to sample."
    )
    parser.add_argument("--temperature", type=float, help="Sample; default: the likeliest token.")
    for name in ("repetition-penalty", "presence-penalty", "frequency-penalty"):
        parser.add_argument(f"--{name}", type=float, help="Sent where it is given.")
    parser.add_argument(
        "-o", "--output-len", type=int, default=100, help="The longest answer, in tokens."
    )
    parser.add_argument("--request-id", default="", help="The request's id.")
    for name in ("stop-words", "bad-words", "embedding-bias-words"):
        parser.add_argument(f"--{name}", nargs="+", default=[], help="Words, one after the other.")
    parser.add_argument(
        "--embedding-bias-weights", nargs="+", type=float, default=[], help="A weight for each."
    )
    parser.add_argument(
        "--overwrite-output-text", action="store_true", help="For models that send the text so far."
    )
    for name in (
        "return-context-logits",
        "return-generation-logits",
        "return-log-probs",
        "return-kv-cache-reuse-stats",
        "exclude-input-in-output",
    ):
        parser.add_argument(f"--{name}", action="store_true", help="Ask for it.")
    parser.add_argument("--end-id", type=int, help="Default: the tokenizer's.")
    parser.add_argument("--pad-id", type=int, help="Default: the tokenizer's.")
    parser.add_argument(
        "--lora-path", type=Path, help="An adapter: a folder that slipstream lora wrote."
    )
    parser.add_argument("--lora-task-id", type=int, help="Its number in the server's cache.")
    parser.add_argument(
        "--expected-outputs", nargs="+", default=[], help="What --check-outputs compares with."
    )
    parser.add_argument(
        "--check-outputs", action="store_true", help="Exit code 1 where the answers differ."
    )
    return parser


def _inputs(given: Namespace, prompts: list[str]) -> dict[str, Array]:
    """The prompts as one batch; whatever else is asked holds for all of them."""
    inputs = {
        "max_tokens": scalar(given.output_len),
        "stream": scalar(given.streaming),
        "beam_width": scalar(given.beam_width),
    }
    optional: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "temperature",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "end_id",
            "pad_id",
            "num_return_sequences",
        )
    }
    for name in (
        "return_context_logits",
        "return_generation_logits",
        "return_log_probs",
        "return_kv_cache_reuse_stats",
        "exclude_input_in_output",
    ):
        optional[name] = getattr(given, name) or None
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


def _show(given: Namespace, answers: list[Answer]) -> list[str]:
    pieces = [
        [bytes(text).decode(errors="replace") for text in answer.outputs["text_output"].reshape(-1)]
        for answer in answers
        if "text_output" in answer.outputs
    ]
    if given.beam_width > 1 or (given.num_return_sequences or 1) > 1 or given.batch_inputs:
        shown = [text for piece in pieces for text in piece]
        print(shown)
        return shown
    texts_so_far = [piece[0] for piece in pieces if piece]
    whole = (
        (texts_so_far[-1] if texts_so_far else "")
        if given.overwrite_output_text
        else "".join(texts_so_far)
    )
    print(whole)
    wanted = {
        "context_logits": given.return_context_logits,
        "generation_logits": given.return_generation_logits,
        "cum_log_probs": given.return_log_probs,
        "output_log_probs": given.return_log_probs,
    }
    for name, asked in wanted.items():
        if asked and answers and name in answers[-1].outputs:
            print(f"{name}.shape: {answers[-1].outputs[name].shape}")
    return [whole]
