"""`slipstream client`: the old inflight_batcher_llm_client.py. Tokens to an engine model over gRPC."""

from __future__ import annotations

import csv
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.compat.client_flags import QUESTIONS, client_parser
from slipstream.cli.connections import connect_grpc
from slipstream.client.connection import Answer, GrpcConnection, Request, ServerError, Tls
from slipstream.client.tensors import Array
from slipstream.client.token_request import (
    TokenRequest,
    as_declared,
    beams_of,
    lora_arrays,
    prompt_table_arrays,
    stop_inputs,
)
from slipstream.client.words import LocalWords, Prompt, ServerWords, Words
from slipstream.server.text.tokenizer import Tokenizer

# What GPT-2 continues the default text with, for --check-output without --output-tokens-csv.
_EXPECTED = [21221, 290, 257, 4255, 379, 262, 1957, 7072, 11, 4689, 347, 2852, 2564, 494, 13, 679]
_CACHE_OUTPUTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
)


def main(arguments: Sequence[str]) -> int:
    given = client_parser().parse(arguments)
    if given.requested_outputs and "output_ids" not in given.requested_outputs:
        raise ValueError("--requested-outputs must name output_ids")
    tls = (
        Tls(given.root_certificates, given.private_key, given.certificate_chain)
        if given.ssl
        else None
    )
    connection = connect_grpc(given.url, tls, given.grpc_compression_algorithm)
    try:
        return _ask(given, connection)
    except ServerError as error:
        hint = (
            "; ask for a stream with --streaming"
            if "decoupled" in str(error) and not given.streaming
            else ""
        )
        print(f"Encountered error: {error}{hint}")
        return 1
    finally:
        connection.close()


def _ask(given: Namespace, connection: GrpcConnection) -> int:
    words = _words(given, connection)
    prompt = _prompt(given, words)
    print("Input sequence: ", prompt.tokens, flush=True)
    # a stop order names the request by its id, so there must be one
    request_id = given.request_id or (str(secrets.randbits(63)) if given.stop_after_ms else "")
    declared = connection.input_types(given.model_name)
    inputs = as_declared(
        _token_request(given, prompt, "exclude_input_in_output" in declared).inputs(), declared
    )
    request = Request(
        given.model_name,
        inputs,
        tuple(given.requested_outputs),
        request_id,
        {"Streaming": given.streaming},
    )
    try:
        answers = list(
            _streamed(given, connection, request)
            if given.streaming
            else _single(given, connection, request)
        )
    except ServerError as error:
        if error.cancelled and given.stop_via_request_cancel:
            print("Request is cancelled")
            return 0
        raise
    print("Got completed request", flush=True)
    return _show(given, words, prompt, answers)


def _words(given: Namespace, connection: GrpcConnection) -> Words | None:
    if given.input_tokens_csv is not None:
        return None
    return (
        LocalWords(Tokenizer.load(Path(given.tokenizer_dir)))
        if given.tokenizer_dir
        else ServerWords(connection)
    )


def _prompt(given: Namespace, words: Words | None) -> Prompt:
    if words is None:
        return Prompt(_first_row(given.input_tokens_csv), given.end_id, given.pad_id)
    return words.encode(given.text)


def _first_row(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(token) for token in next(csv.reader(file))]


def _token_request(given: Namespace, prompt: Prompt, may_exclude: bool) -> TokenRequest:
    optional: dict[str, Any] = {
        name: getattr(given, name)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    optional["num_return_sequences"] = given.num_return_sequences
    for name in (question.replace("-", "_") for question in QUESTIONS):
        optional[name] = getattr(given, name) or None
    # before 0.14 only the repository decided; what came back shows whether the prompt is in it
    optional["exclude_input_in_output"] = (given.exclude_input_in_output and may_exclude) or None
    return TokenRequest(
        prompt.tokens,
        given.request_output_len,
        prompt.end_id,
        prompt.pad_id,
        given.beam_width,
        given.temperature,
        given.top_k,
        given.top_p,
        given.streaming,
        given.return_log_probs,
        optional,
        _arrays(given, prompt.tokens),
    )


def _arrays(given: Namespace, tokens: list[int]) -> dict[str, Array]:
    arrays = lora_arrays(given.lora_path, given.lora_task_id)
    if given.prompt_embedding_table_path is not None:
        arrays.update(
            prompt_table_arrays(
                given.prompt_embedding_table_path, given.prompt_task_id, given.dtype
            )
        )
    if given.prompt_table_extra_id is not None:
        extra = [
            given.prompt_table_extra_id if token >= given.vocab_size else 0 for token in tokens
        ]
        arrays["prompt_table_extra_ids"] = numpy.array([extra], dtype=numpy.uint64)
    if given.draft_tokens_csv is not None:
        arrays["draft_input_ids"] = numpy.array(
            [_first_row(given.draft_tokens_csv)], dtype=numpy.int32
        )
    return arrays


def _single(given: Namespace, connection: GrpcConnection, request: Request) -> Iterator[Answer]:
    pending = connection.infer_later(request)
    if given.stop_after_ms:
        time.sleep(given.stop_after_ms / 1000)
        if given.stop_via_request_cancel:
            pending.cancel()
        else:
            connection.infer(
                Request(given.model_name, stop_inputs(), request_id=request.request_id)
            )
            print("Got cancellation response from server", flush=True)
    yield pending.result()


def _streamed(given: Namespace, connection: GrpcConnection, request: Request) -> Iterator[Answer]:
    asking = threading.Event()  # the stream stays open for a stop order until the answer is whole

    def requests() -> Iterator[Request]:
        yield request
        if given.stop_after_ms and not given.stop_via_request_cancel:
            if not asking.wait(given.stop_after_ms / 1000):
                yield Request(given.model_name, stop_inputs(), request_id=request.request_id)
        elif given.stop_after_ms and not asking.wait(given.stop_after_ms / 1000):
            stream.cancel()

    stream = connection.stream(requests(), given.stream_timeout)
    try:
        for answer in stream:
            if "output_ids" not in answer.outputs:
                continue  # the answer to a stop order, or a bare end mark
            if any(beams_of(answer.outputs, [])):
                yield answer
    finally:
        asking.set()


def _show(given: Namespace, words: Words | None, prompt: Prompt, answers: list[Answer]) -> int:
    if given.requested_outputs and answers:
        names = set(answers[-1].outputs)
        if names != set(given.requested_outputs):
            print(
                f"Encountered error: the answer holds {sorted(names)}, not {sorted(given.requested_outputs)}"
            )
            return 1
    beams = _beams(given, prompt, answers)
    for position, tokens in enumerate(beams):
        if words is not None:
            print(f"Input: {given.text}")
            print(f"Output beam {position}: {words.decode(tokens) if tokens else ''}")
        print("Output sequence: ", [*prompt.tokens, *tokens])
    _show_extras(given, answers)
    if given.stop_after_ms and len(beams[0]) >= given.request_output_len:
        print("The answer was complete before the stop order came")
    return _check(given, beams[0]) if given.check_output else 0


def _beams(given: Namespace, prompt: Prompt, answers: list[Answer]) -> list[list[int]]:
    """The new tokens of each answer. Pieces of a stream are joined; beams come whole, and only at
    the end.
    """
    if not given.streaming or given.beam_width > 1:
        return [beam for answer in answers for beam in beams_of(answer.outputs, prompt.tokens)]
    pieces: dict[int, list[int]] = {0: []}
    for answer in answers:
        index = answer.outputs.get("sequence_index")
        place = int(index.reshape(-1)[0]) if index is not None else 0
        pieces.setdefault(place, []).extend(beams_of(answer.outputs, [])[0])
    return [pieces[place] for place in sorted(pieces)]


def _show_extras(given: Namespace, answers: list[Answer]) -> None:
    wanted = {"cum_log_probs": given.return_log_probs, "output_log_probs": given.return_log_probs}
    wanted |= {
        question[len("return-") :].replace("-", "_"): getattr(given, question.replace("-", "_"))
        for question in QUESTIONS
    }
    if given.return_kv_cache_reuse_stats:
        wanted |= dict.fromkeys(_CACHE_OUTPUTS, True)
    for name, asked in wanted.items():
        if asked and answers and name in answers[-1].outputs:
            array = answers[-1].outputs[name]
            print(f"{name}.shape: {array.shape}")
            print(f"{name}: {array}")


def _check(given: Namespace, tokens: list[int]) -> int:
    expected = _first_row(given.output_tokens_csv) if given.output_tokens_csv else _EXPECTED
    print("expected_output_ids = ", expected, "\nactual_output_ids = ", tokens)
    equal = sum(one == other for one, other in zip(expected, tokens, strict=False))
    passed = equal >= given.correctness_threshold * max(len(expected), len(tokens))
    print("PASS!" if passed else "FAIL!")
    return 0 if passed else 1
