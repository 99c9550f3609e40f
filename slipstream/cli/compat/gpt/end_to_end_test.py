"""The old tools/gpt/end_to_end_test.py: compares the ensemble with its three steps."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping

import numpy

from slipstream.cli.arguments import NO_EFFECT, CommandError, Parser
from slipstream.cli.compat.request_flags import add_gpt_sampling
from slipstream.cli.connections import add_connection, connected
from slipstream.client.connection import Connection, Request
from slipstream.client.tensors import Array, scalar, text_list, texts
from slipstream.client.text_models import preprocessing_inputs
from slipstream.client.token_request import as_declared

_PROMPTS = (
    "The harbour was quiet that morning",
    "In the spring of that year the",
    "She opened the letter and read",
    "They had not expected the train to",
    "A good recipe begins with",
    "The engineers measured the bridge and",
    "When the lights went out, the",
    "Born in north-east France, Soyer trained as a",
)
_BAD_WORDS = ["Hawks, Hawks"]
_STOP_WORDS = ["month, month"]
# input of an ensemble: its name in the first releases
OLD_NAMES = {
    "text_input": "INPUT_0",
    "max_tokens": "INPUT_1",
    "bad_words": "INPUT_2",
    "stop_words": "INPUT_3",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
}


def create_parser() -> Parser:
    parser = Parser("end_to_end_test.py", "Compare the gpt repository's ensemble with its steps.")
    add_connection(parser)
    add_gpt_sampling(parser)
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "-c", "--concurrency", type=int, default=1, help="One request is sent at a time."
    )
    ignored.add_argument("-t", "--text", help="The texts are fixed.")
    ignored.add_argument("--tokenizer_dir", help="The server's tokenizer is used.")
    ignored.add_argument("--tokenizer_type", help=NO_EFFECT)
    return parser


def run(given: Namespace) -> int:
    sampling = {"beam_width": given.beam_width, "top_k": given.topk, "top_p": given.topp}
    with connected(given) as connection:
        by_steps = _infer_by_steps(connection, given.output_len, sampling)
        started = time.monotonic()
        by_ensemble = _infer_ensemble(connection, given.output_len, sampling)
    print(f"[INFO] Latency: {(time.monotonic() - started) * 1000:.3f} ms")
    if by_steps != by_ensemble:
        raise CommandError(f"the steps give {by_steps}, the ensemble gives {by_ensemble}")
    print("[INFO] Functionality test succeed.")
    return 0


def _column(value: int | float) -> Array:
    """Return the same value for every prompt."""
    return numpy.repeat(scalar(value), len(_PROMPTS), axis=0)


def _send(connection: Connection, model: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    request = Request(model, as_declared(inputs, connection.input_types(model)))
    return connection.infer(request).outputs


def _infer_by_steps(
    connection: Connection, length: int, sampling: Mapping[str, int | float]
) -> list[str]:
    inputs = preprocessing_inputs(_PROMPTS, length, _BAD_WORDS, _STOP_WORDS)
    prepared = _send(connection, "preprocessing", inputs)
    tensors = {
        "input_ids": prepared["INPUT_ID"],
        "input_lengths": prepared["REQUEST_INPUT_LEN"],
        "request_output_len": prepared["REQUEST_OUTPUT_LEN"],
        "beam_width": _column(sampling["beam_width"]),
        "runtime_top_k": _column(sampling["top_k"]),
        "runtime_top_p": _column(sampling["top_p"]),
    }
    generated = _send(connection, "tensorrt_llm", tensors)
    ids = {"TOKENS_BATCH": generated["output_ids"]}
    return text_list(_send(connection, "postprocessing", ids)["OUTPUT"])


def _infer_ensemble(
    connection: Connection, length: int, sampling: Mapping[str, int | float]
) -> list[str]:
    declared = connection.input_types("ensemble")
    inputs = {
        "text_input": texts(*([prompt] for prompt in _PROMPTS)),
        "max_tokens": _column(length),
        "bad_words": texts(*[_BAD_WORDS] * len(_PROMPTS)),
        "stop_words": texts(*[_STOP_WORDS] * len(_PROMPTS)),
        **{name: _column(value) for name, value in sampling.items()},
    }
    renamed = {
        name if name in declared else OLD_NAMES.get(name, name): array
        for name, array in inputs.items()
    }
    outputs = _send(connection, "ensemble", renamed)
    return text_list(next(iter(outputs.values())))
