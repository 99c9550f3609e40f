"""The old tools' end_to_end_test.py: the steps by hand must give the ensemble's text; then a timed
run of them all.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy

from slipstream.bench.prompts import Item, read_dataset
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, texts
from slipstream.client.token_request import scalar
from slipstream.client.words import postprocess

_TOKENS_PER_WORD, _WARM_UPS = 1.3, 10
# What else may be asked for and compared: the outputs that show it.
_EXTRAS = {
    "log_probs": ("cum_log_probs", "output_log_probs"),
    "context_logits": ("context_logits",),
    "generation_logits": ("generation_logits",),
}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "end_to_end_test.py", description="Compare an ensemble with its steps, then time it."
    )
    add_connection(parser)
    parser.add_argument("-c", "--concurrency", type=int, default=128, help="Requests in flight.")
    parser.add_argument("--max-input-len", type=int, help="Leave out longer prompts.")
    parser.add_argument(
        "--dataset",
        type=Path,
        required=True,
        help="A JSON list of objects with input, instruction and output.",
    )
    parser.add_argument(
        "--test-bls", action="store_true", help="Ask tensorrt_llm_bls instead of the ensemble."
    )
    for name in _EXTRAS:
        parser.add_argument(
            f"--return-{name.replace('_', '-')}", action="store_true", help="Compare them, too."
        )
    given = parser.parse(arguments)
    connection = open_connection(given)
    try:
        _run(given, connection, read_dataset(given.dataset))
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    return 0


def _run(given: Namespace, connection: Connection, items: list[Item]) -> None:
    kept = []
    for item in items:
        before = connection.infer(
            Request(
                "preprocessing",
                {
                    "QUERY": texts([item.prompt]),
                    "BAD_WORDS_DICT": texts([""]),
                    "STOP_WORDS_DICT": texts([""]),
                    "REQUEST_OUTPUT_LEN": scalar(_length(item)),
                },
            )
        ).outputs
        if (
            given.max_input_len is not None
            and int(before["REQUEST_INPUT_LEN"].reshape(-1)[0]) > given.max_input_len
        ):
            continue
        kept.append(item)
        _compare(_by_hand(given, connection, before), _whole(given, connection, item, ""))
    if not kept:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    print("[INFO] Functionality test succeed.", flush=True)
    print("[INFO] Warm up for benchmarking.", flush=True)
    for _ in range(_WARM_UPS):
        _whole(given, connection, kept[0], "")
    print(f"[INFO] Start benchmarking on {len(kept)} prompts.", flush=True)
    started = time.monotonic()
    with ThreadPoolExecutor(given.concurrency) as pool:
        list(
            pool.map(lambda pair: _whole(given, connection, pair[1], str(pair[0])), enumerate(kept))
        )
    print(f"[INFO] Total Latency: {(time.monotonic() - started) * 1000:.3f} ms")


def _length(item: Item) -> int:
    return max(1, int(item.output_words * _TOKENS_PER_WORD))


class _Seen(NamedTuple):
    text: str
    arrays: Mapping[str, Array]  # of what was asked for beyond the text


def _compare(by_hand: _Seen, whole: _Seen) -> None:
    if by_hand.text != whole.text:
        raise CommandError(
            f"the steps by hand give {by_hand.text!r}, the model gives {whole.text!r}"
        )
    for name, array in by_hand.arrays.items():
        if name not in whole.arrays or not numpy.array_equal(array, whole.arrays[name]):
            raise CommandError(f"the {name} of the steps by hand are not those of the model")


def _asked(given: Namespace) -> list[str]:
    return [name for name in _EXTRAS if getattr(given, f"return_{name}")]


def _arrays(given: Namespace, outputs: Mapping[str, Array]) -> dict[str, Array]:
    wanted = [output for name in _asked(given) for output in _EXTRAS[name]]
    missing = [output for output in wanted if output not in outputs]
    if missing:
        raise CommandError(f"the answer holds no {missing[0]}")
    return {output: outputs[output] for output in wanted}


def _by_hand(given: Namespace, connection: Connection, before: Mapping[str, Array]) -> _Seen:
    inputs = {
        "input_ids": before["INPUT_ID"],
        "input_lengths": before["REQUEST_INPUT_LEN"],
        "request_output_len": before["REQUEST_OUTPUT_LEN"],
    }
    for tensor, source in (("end_id", "OUT_END_ID"), ("pad_id", "OUT_PAD_ID")):
        if source in before:
            inputs[tensor] = before[source]
    inputs |= {f"return_{name}": scalar(True) for name in _asked(given)}
    middle = connection.infer(Request("tensorrt_llm", inputs)).outputs
    count = numpy.array([[middle["output_ids"].shape[2]]], dtype=numpy.int32)
    text = postprocess(connection, middle["output_ids"], middle.get("sequence_length", count))
    return _Seen(text, _arrays(given, middle))


def _whole(given: Namespace, connection: Connection, item: Item, request_id: str) -> _Seen:
    inputs = {
        "text_input": texts([item.prompt]),
        "max_tokens": scalar(_length(item)),
        "bad_words": texts([""]),
        "stop_words": texts([""]),
        **{f"return_{name}": scalar(True) for name in _asked(given)},
    }
    model = "tensorrt_llm_bls" if given.test_bls else "ensemble"
    outputs = ("text_output", *(output for name in _asked(given) for output in _EXTRAS[name]))
    answer = connection.infer(Request(model, inputs, outputs=outputs, request_id=request_id))
    text = bytes(answer.outputs["text_output"].reshape(-1)[0]).decode(errors="replace")
    return _Seen(text, _arrays(given, answer.outputs))
