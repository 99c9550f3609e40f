"""`slipstream client`: the old inflight_batcher_llm_client.py. Sends tokens to an engine model."""

from __future__ import annotations

import csv
import secrets
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy

from slipstream.cli.arguments import CommandError
from slipstream.cli.compat.client_flags import FURTHER_OUTPUTS, create_parser
from slipstream.cli.compat.request_flags import PENALTIES
from slipstream.cli.connections import connect_grpc
from slipstream.client.connection import Answer, GrpcConnection, Request, ServerError, Tls
from slipstream.client.tensors import Array
from slipstream.client.text_models import LocalTokenizer, Prompt, ServerTokenizer, TextModels
from slipstream.client.token_client import Stop, infer_once, infer_stream, join_answers
from slipstream.client.token_request import (
    TokenRequest,
    as_declared,
    lora_arrays,
    prompt_table_arrays,
)
from slipstream.server.text.tokenizer import Tokenizer

__all__ = ["create_parser", "run"]

# GPT-2's continuation of the default text, for --check-output without --output-tokens-csv
_EXPECTED = [21221, 290, 257, 4255, 379, 262, 1957, 7072, 11, 4689, 347, 2852, 2564, 494, 13, 679]
_CACHE_OUTPUTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
)


def run(given: Namespace) -> int:
    if given.requested_outputs and "output_ids" not in given.requested_outputs:
        raise CommandError("--requested-outputs must name output_ids")
    tls = None
    if given.ssl:
        tls = Tls(given.root_certificates, given.private_key, given.certificate_chain)
    connection = connect_grpc(given.url, tls, given.grpc_compression_algorithm)
    try:
        return _ask(given, connection)
    except ServerError as error:
        hint = ""
        if "decoupled" in str(error) and not given.streaming:
            hint = "; ask for a stream with --streaming"
        print(f"Encountered error: {error}{hint}")
        return 1
    finally:
        connection.close()


def _ask(given: Namespace, connection: GrpcConnection) -> int:
    text_models = _text_models(given, connection)
    prompt = _prompt(given, text_models)
    print("Input sequence: ", prompt.tokens, flush=True)
    declared = connection.input_types(given.model_name)
    request = _request(given, prompt, declared)
    stop = None
    if given.stop_after_ms:
        stop = Stop(given.stop_after_ms / 1000, given.stop_via_request_cancel, _print_stopped)
    try:
        if given.streaming:
            answers = list(infer_stream(connection, request, stop, given.stream_timeout))
        else:
            answers = list(infer_once(connection, request, stop))
    except ServerError as error:
        if error.cancelled and given.stop_via_request_cancel:
            print("Request is cancelled")
            return 0
        raise
    print("Got completed request", flush=True)
    return _print_answers(given, text_models, prompt, answers)


def _print_stopped() -> None:
    print("Got cancellation response from server", flush=True)


def _text_models(given: Namespace, connection: GrpcConnection) -> TextModels | None:
    """Return what tokenises the prompt, or None if the prompt is given as token ids."""
    if given.input_tokens_csv is not None:
        return None
    if given.tokenizer_dir:
        return LocalTokenizer(Tokenizer.load(Path(given.tokenizer_dir)))
    return ServerTokenizer(connection)


def _prompt(given: Namespace, text_models: TextModels | None) -> Prompt:
    if text_models is None:
        return Prompt(_first_row(given.input_tokens_csv), given.end_id, given.pad_id)
    return text_models.encode(given.text)


def _first_row(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(token) for token in next(csv.reader(file))]


def _request(given: Namespace, prompt: Prompt, declared: Any) -> Request:
    may_exclude = "exclude_input_in_output" in declared
    inputs = _token_request(given, prompt, may_exclude).inputs()
    request_id = given.request_id
    if given.stop_after_ms and not request_id:
        request_id = str(secrets.randbits(63))  # a stop request names the request by its id
    return Request(
        given.model_name,
        as_declared(inputs, declared),
        tuple(given.requested_outputs),
        request_id,
        {"Streaming": given.streaming},
    )


def _token_request(given: Namespace, prompt: Prompt, may_exclude: bool) -> TokenRequest:
    optional: dict[str, Any] = {name: getattr(given, name) for name in PENALTIES}
    optional["num_return_sequences"] = given.num_return_sequences
    for name in FURTHER_OUTPUTS:
        optional[name] = getattr(given, name) or None
    # Before 0.14 only the repository decided this, and the tensor did not exist.
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
    """Return the tensors of adapters, prompt tuning and draft tokens."""
    arrays = lora_arrays(given.lora_path, given.lora_task_id)
    if given.prompt_embedding_table_path is not None:
        arrays |= prompt_table_arrays(
            given.prompt_embedding_table_path, given.prompt_task_id, given.dtype
        )
    if given.prompt_table_extra_id is not None:
        extra = [
            given.prompt_table_extra_id if token >= given.vocab_size else 0 for token in tokens
        ]
        arrays["prompt_table_extra_ids"] = numpy.array([extra], dtype=numpy.uint64)
    if given.draft_tokens_csv is not None:
        draft = _first_row(given.draft_tokens_csv)
        arrays["draft_input_ids"] = numpy.array([draft], dtype=numpy.int32)
    return arrays


def _print_answers(
    given: Namespace, text_models: TextModels | None, prompt: Prompt, answers: list[Answer]
) -> int:
    if given.requested_outputs and answers:
        names = set(answers[-1].outputs)
        if names != set(given.requested_outputs):
            expected = sorted(given.requested_outputs)
            print(f"Encountered error: the answer holds {sorted(names)}, not {expected}")
            return 1
    # beams come whole, at the end of a stream
    streamed = given.streaming and given.beam_width == 1
    beams = join_answers(answers, prompt.tokens, streamed)
    for position, tokens in enumerate(beams):
        if text_models is not None:
            print(f"Input: {given.text}")
            print(f"Output beam {position}: {text_models.decode(tokens) if tokens else ''}")
        print("Output sequence: ", [*prompt.tokens, *tokens])
    _print_further_outputs(given, answers)
    if given.stop_after_ms and len(beams[0]) >= given.request_output_len:
        print("The answer was complete before the stop request was sent")
    return _check(given, beams[0]) if given.check_output else 0


def _print_further_outputs(given: Namespace, answers: list[Answer]) -> None:
    names = [name.removeprefix("return_") for name in FURTHER_OUTPUTS if getattr(given, name)]
    if given.return_log_probs:
        names = ["cum_log_probs", "output_log_probs", *names]
    if given.return_kv_cache_reuse_stats:
        names += _CACHE_OUTPUTS
    outputs = answers[-1].outputs if answers else {}
    for name in names:
        if name in outputs:
            print(f"{name}.shape: {outputs[name].shape}")
            print(f"{name}: {outputs[name]}")


def _check(given: Namespace, tokens: list[int]) -> int:
    expected = _first_row(given.output_tokens_csv) if given.output_tokens_csv else _EXPECTED
    print("expected_output_ids = ", expected, "\nactual_output_ids = ", tokens)
    equal = sum(one == other for one, other in zip(expected, tokens, strict=False))
    passed = equal >= given.correctness_threshold * max(len(expected), len(tokens))
    print("PASS!" if passed else "FAIL!")
    return 0 if passed else 1
