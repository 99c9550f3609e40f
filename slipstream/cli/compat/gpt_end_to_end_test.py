"""The old tools/gpt/end_to_end_test.py: a batch of texts through the steps by hand, and through the
ensemble.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.gpt_client import add_sampling
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, texts
from slipstream.client.token_request import as_declared, scalar

_PROMPTS = (
    "The harbour was quiet that morning",
    "In the spring of that year the",
    "She opened the letter and read",
    "Nobody had expected the train to",
    "A good recipe begins with",
    "The engineers measured the bridge and",
    "When the lights went out, the",
    "Born in north-east France, Soyer trained as a",
)
_BAD_WORDS, _STOP_WORDS = "Hawks, Hawks", "month, month"
_OLD_NAMES = {
    "text_input": "INPUT_0",
    "max_tokens": "INPUT_1",
    "bad_words": "INPUT_2",
    "stop_words": "INPUT_3",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "end_to_end_test.py", description="Compare the gpt repository's ensemble with its steps."
    )
    add_connection(parser)
    parser.add_argument(
        "-c", "--concurrency", type=int, default=1, help="No effect: there is one request."
    )
    add_sampling(parser)
    parser.add_argument("-o", "--output_len", type=int, default=10, help="Tokens to ask for.")
    parser.add_argument("-t", "--text", help="No effect: the texts are fixed.")
    parser.add_argument("--tokenizer_dir", help="No effect: the server's own tokenizer is used.")
    parser.add_argument("--tokenizer_type", help="No effect.")
    given = parser.parse(arguments)
    connection = open_connection(given)
    try:
        shared = {"beam_width": given.beam_width, "top_k": given.topk, "top_p": given.topp}
        by_hand = _by_hand(connection, given.output_len, shared)
        started = time.monotonic()
        whole = _whole(connection, given.output_len, shared)
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    print(f"[INFO] Latency: {(time.monotonic() - started) * 1000:.3f} ms")
    if by_hand != whole:
        raise CommandError(f"the steps by hand give {by_hand}, the ensemble gives {whole}")
    print("[INFO] Functionality test succeed.")
    return 0


def _column(value: int | float) -> Array:
    return numpy.repeat(scalar(value), len(_PROMPTS), axis=0)


def _lists(text: str) -> Array:
    return texts(*([text] for _ in _PROMPTS))


def _send(connection: Connection, model: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return connection.infer(
        Request(model, as_declared(inputs, connection.input_types(model)))
    ).outputs


def _by_hand(connection: Connection, length: int, shared: Mapping[str, int | float]) -> list[str]:
    before = _send(
        connection,
        "preprocessing",
        {
            "QUERY": texts(*([prompt] for prompt in _PROMPTS)),
            "REQUEST_OUTPUT_LEN": _column(length),
            "BAD_WORDS_DICT": _lists(_BAD_WORDS),
            "STOP_WORDS_DICT": _lists(_STOP_WORDS),
        },
    )
    names = {"beam_width": "beam_width", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    middle = _send(
        connection,
        "tensorrt_llm",
        {
            "input_ids": before["INPUT_ID"],
            "input_lengths": before["REQUEST_INPUT_LEN"],
            "request_output_len": before["REQUEST_OUTPUT_LEN"],
            **{names[name]: _column(value) for name, value in shared.items()},
        },
    )
    after = _send(connection, "postprocessing", {"TOKENS_BATCH": middle["output_ids"]})
    return _strings(after["OUTPUT"])


def _whole(connection: Connection, length: int, shared: Mapping[str, int | float]) -> list[str]:
    declared = connection.input_types("ensemble")
    inputs = {
        "text_input": texts(*([prompt] for prompt in _PROMPTS)),
        "max_tokens": _column(length),
        "bad_words": _lists(_BAD_WORDS),
        "stop_words": _lists(_STOP_WORDS),
        **{name: _column(value) for name, value in shared.items()},
    }
    named = {
        name if name in declared else _OLD_NAMES.get(name, name): array
        for name, array in inputs.items()
    }
    return _strings(next(iter(_send(connection, "ensemble", named).values())))


def _strings(tensor: Array) -> list[str]:
    return [bytes(text).decode(errors="replace") for text in tensor.reshape(-1)]
