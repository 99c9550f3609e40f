"""The old end_to_end_test.py: compares the ensemble with its three steps, then times it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy

from slipstream.bench.prompts import DatasetItem, read_dataset
from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_connection, connected
from slipstream.client.connection import Connection, Request
from slipstream.client.tensors import Array, first_text, scalar, texts
from slipstream.client.text_models import postprocess, preprocessing_inputs

_TOKENS_PER_WORD = 1.3
_WARM_UPS = 10
# --return-X: the outputs that are compared
_FURTHER_OUTPUTS = {
    "log_probs": ("cum_log_probs", "output_log_probs"),
    "context_logits": ("context_logits",),
    "generation_logits": ("generation_logits",),
}


class _Result(NamedTuple):
    text: str
    arrays: Mapping[str, Array]  # the further outputs


def create_parser() -> Parser:
    parser = Parser("end_to_end_test.py", "Compare an ensemble with its steps, then time it.")
    add_connection(parser)
    parser.add_argument(
        "--dataset",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON list of objects with input, instruction and output.",
    )
    parser.add_argument(
        "-c",
        "--concurrency",
        type=int,
        default=128,
        metavar="REQUESTS",
        help="Number of requests in flight.",
    )
    parser.add_argument(
        "--max-input-len",
        type=int,
        metavar="TOKENS",
        help="Leave out longer prompts (default: no limit).",
    )
    parser.add_argument(
        "--test-bls", action="store_true", help="Use tensorrt_llm_bls instead of the ensemble."
    )
    for name in _FURTHER_OUTPUTS:
        words = name.replace("_", " ").replace("log probs", "log-probabilities")
        parser.add_argument(
            f"--return-{name.replace('_', '-')}", action="store_true", help=f"Compare {words} too."
        )
    return parser


def run(given: Namespace) -> int:
    items = read_dataset(given.dataset)
    with connected(given) as connection:
        _run_test(given, connection, items)
    return 0


def _run_test(given: Namespace, connection: Connection, items: list[DatasetItem]) -> None:
    kept = []
    for item in items:
        inputs = preprocessing_inputs([item.prompt], _output_length(item))
        prepared = connection.infer(Request("preprocessing", inputs)).outputs
        length = int(prepared["REQUEST_INPUT_LEN"].reshape(-1)[0])
        if given.max_input_len is not None and length > given.max_input_len:
            continue
        kept.append(item)
        by_steps = _infer_by_steps(given, connection, prepared)
        _compare(by_steps, _infer_ensemble(given, connection, item, ""))
    if not kept:
        raise CommandError("no prompt is left to send; raise --max-input-len")
    print("[INFO] Functionality test succeed.", flush=True)
    print("[INFO] Warm up for benchmarking.", flush=True)
    for _ in range(_WARM_UPS):
        _infer_ensemble(given, connection, kept[0], "")
    print(f"[INFO] Start benchmarking on {len(kept)} prompts.", flush=True)
    started = time.monotonic()
    with ThreadPoolExecutor(given.concurrency) as pool:
        pending = [
            pool.submit(_infer_ensemble, given, connection, item, str(number))
            for number, item in enumerate(kept)
        ]
        for future in pending:
            future.result()
    print(f"[INFO] Total Latency: {(time.monotonic() - started) * 1000:.3f} ms")


def _output_length(item: DatasetItem) -> int:
    return max(1, int(item.output_words * _TOKENS_PER_WORD))


def _compare(by_steps: _Result, by_ensemble: _Result) -> None:
    if by_steps.text != by_ensemble.text:
        raise CommandError(
            f"the steps give {by_steps.text!r}, the model gives {by_ensemble.text!r}"
        )
    for name, array in by_steps.arrays.items():
        if not numpy.array_equal(array, by_ensemble.arrays[name]):
            raise CommandError(f"the {name} of the steps are not those of the model")


def _requested(given: Namespace) -> list[str]:
    return [name for name in _FURTHER_OUTPUTS if getattr(given, f"return_{name}")]


def _output_names(given: Namespace) -> list[str]:
    names: list[str] = []
    for name in _requested(given):
        names += _FURTHER_OUTPUTS[name]
    return names


def _further_outputs(given: Namespace, outputs: Mapping[str, Array]) -> dict[str, Array]:
    names = _output_names(given)
    missing = [name for name in names if name not in outputs]
    if missing:
        raise CommandError(f"the answer holds no {missing[0]}")
    return {name: outputs[name] for name in names}


def _infer_by_steps(
    given: Namespace, connection: Connection, prepared: Mapping[str, Array]
) -> _Result:
    inputs = {
        "input_ids": prepared["INPUT_ID"],
        "input_lengths": prepared["REQUEST_INPUT_LEN"],
        "request_output_len": prepared["REQUEST_OUTPUT_LEN"],
    }
    for tensor, source in (("end_id", "OUT_END_ID"), ("pad_id", "OUT_PAD_ID")):
        if source in prepared:
            inputs[tensor] = prepared[source]
    inputs |= {f"return_{name}": scalar(True) for name in _requested(given)}
    generated = connection.infer(Request("tensorrt_llm", inputs)).outputs
    ids = generated["output_ids"]
    text = postprocess(connection, ids, generated.get("sequence_length", scalar(ids.shape[2])))
    return _Result(text, _further_outputs(given, generated))


def _infer_ensemble(
    given: Namespace, connection: Connection, item: DatasetItem, request_id: str
) -> _Result:
    inputs = {
        "text_input": texts([item.prompt]),
        "max_tokens": scalar(_output_length(item)),
        "bad_words": texts([""]),
        "stop_words": texts([""]),
        **{f"return_{name}": scalar(True) for name in _requested(given)},
    }
    model = "tensorrt_llm_bls" if given.test_bls else "ensemble"
    names = ("text_output", *_output_names(given))
    answer = connection.infer(Request(model, inputs, outputs=names, request_id=request_id))
    text = first_text(answer.outputs["text_output"])
    return _Result(text, _further_outputs(given, answer.outputs))
