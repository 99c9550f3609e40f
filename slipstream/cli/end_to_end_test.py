"""The old tools' end_to_end_test.py: the steps by hand must give the ensemble's text; then a timed run of them all."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from slipstream.bench.prompts import Item, read_dataset
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_connection, open_connection
from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, texts
from slipstream.client.token_request import scalar
from slipstream.client.words import postprocess

_TOKENS_PER_WORD, _WARM_UPS = 1.3, 10


def main(arguments: Sequence[str]) -> int:
    parser = Parser("end_to_end_test.py", description="Compare an ensemble with its steps, then time it.")
    add_connection(parser)
    parser.add_argument("-c", "--concurrency", type=int, default=128)
    parser.add_argument("--max-input-len", type=int, help="Leave out longer prompts.")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--test-bls", action="store_true", help="Ask tensorrt_llm_bls instead of the ensemble.")
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
        before = connection.infer(Request("preprocessing", {
            "QUERY": texts([item.prompt]), "BAD_WORDS_DICT": texts([""]), "STOP_WORDS_DICT": texts([""]),
            "REQUEST_OUTPUT_LEN": scalar(_length(item))})).outputs
        if given.max_input_len is not None and int(before["REQUEST_INPUT_LEN"].reshape(-1)[0]) > given.max_input_len:
            continue
        kept.append(item)
        by_hand, whole = _by_hand(connection, before), _whole(given, connection, item, "")
        if by_hand != whole:
            raise CommandError(f"the steps by hand give {by_hand!r}, the model gives {whole!r}")
    if not kept:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    print("[INFO] Functionality test succeed.", flush=True)
    print("[INFO] Warm up for benchmarking.", flush=True)
    for _ in range(_WARM_UPS):
        _whole(given, connection, kept[0], "")
    print(f"[INFO] Start benchmarking on {len(kept)} prompts.", flush=True)
    started = time.monotonic()
    with ThreadPoolExecutor(given.concurrency) as pool:
        list(pool.map(lambda pair: _whole(given, connection, pair[1], str(pair[0])), enumerate(kept)))
    print(f"[INFO] Total Latency: {(time.monotonic() - started) * 1000:.3f} ms")


def _length(item: Item) -> int:
    return max(1, int(item.output_words * _TOKENS_PER_WORD))


def _by_hand(connection: Connection, before: Mapping[str, Array]) -> str:
    inputs = {"input_ids": before["INPUT_ID"], "input_lengths": before["REQUEST_INPUT_LEN"],
              "request_output_len": before["REQUEST_OUTPUT_LEN"]}
    for tensor, source in (("end_id", "OUT_END_ID"), ("pad_id", "OUT_PAD_ID")):
        if source in before:
            inputs[tensor] = before[source]
    middle = connection.infer(Request("tensorrt_llm", inputs)).outputs
    count = numpy.array([[middle["output_ids"].shape[2]]], dtype=numpy.int32)
    return postprocess(connection, middle["output_ids"], middle.get("sequence_length", count))


def _whole(given: Namespace, connection: Connection, item: Item, request_id: str) -> str:
    inputs = {"text_input": texts([item.prompt]), "max_tokens": scalar(_length(item)), "bad_words": texts([""]),
              "stop_words": texts([""])}
    model = "tensorrt_llm_bls" if given.test_bls else "ensemble"
    answer = connection.infer(Request(model, inputs, outputs=("text_output",), request_id=request_id))
    return bytes(answer.outputs["text_output"].reshape(-1)[0]).decode(errors="replace")
