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

from slipstream.cli.arguments import Parser
from slipstream.client.connection import Answer, GrpcConnection, Request, ServerError, Tls
from slipstream.client.token_request import (
    TokenRequest,
    as_declared,
    beams_of,
    lora_arrays,
    prompt_table_arrays,
    stop_inputs,
)
from slipstream.client.words import LocalWords, Prompt, ServerWords, Words
from slipstream.server.protocol import messages
from slipstream.server.text.tokenizer import Tokenizer

DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"
# What GPT-2 continues the default text with, for --check-output without --output-tokens-csv.
_EXPECTED = [21221, 290, 257, 4255, 379, 262, 1957, 7072, 11, 4689, 347, 2852, 2564, 494, 13, 679]


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    if given.requested_outputs and "output_ids" not in given.requested_outputs:
        raise ValueError("--requested-outputs must name output_ids")
    tls = Tls(given.root_certificates, given.private_key, given.certificate_chain) if given.ssl else None
    connection = GrpcConnection(messages, given.url, tls)
    try:
        return _ask(given, connection)
    except ServerError as error:
        print(f"Encountered error: {error}")
        return 1
    finally:
        connection.close()


def _parser() -> Parser:
    parser = Parser("slipstream client", description="Send tokens to an engine model and print what comes back.")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-u", "--url", default="localhost:8001", help="The server's gRPC address.")
    parser.add_argument("--model-name", default="tensorrt_llm")
    parser.add_argument("--text", default=DEFAULT_TEXT)
    parser.add_argument("--input-tokens-csv", type=Path, help="The prompt's ids, in the first row.")
    parser.add_argument("--draft-tokens-csv", type=Path)
    parser.add_argument("--output-tokens-csv", type=Path, help="What --check-output compares with.")
    parser.add_argument("--end-id", type=int, default=50256, help="With --input-tokens-csv; else the tokenizer's.")
    parser.add_argument("--pad-id", type=int, default=50256)
    parser.add_argument("-s", "--ssl", action="store_true")
    for short, name in (("-r", "root-certificates"), ("-p", "private-key"), ("-x", "certificate-chain")):
        parser.add_argument(short, f"--{name}", type=Path)
    parser.add_argument("-t", "--stream-timeout", type=float, help="Seconds.")
    parser.add_argument("-C", "--grpc-compression-algorithm", help="Accepted, not used.")
    parser.add_argument("-S", "--streaming", action="store_true")
    parser.add_argument("-c", "--check-output", action="store_true", help="PASS! or FAIL!, and exit code 1 on FAIL.")
    parser.add_argument("-b", "--beam-width", type=int, default=1)
    parser.add_argument("-n", "--num-return-sequences", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=1.0)
    for name in ("repetition-penalty", "presence-penalty", "frequency-penalty"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--top-p", type=float, default=0.0)
    parser.add_argument("--request-output-len", type=int, default=16)
    parser.add_argument("--stop-after-ms", type=int, default=0, help="Send a stop order after so many milliseconds.")
    parser.add_argument("--stop-via-request-cancel", action="store_true", help="Cancel the call instead.")
    parser.add_argument("--tokenizer-dir", help="Default: the server's own text models do it.")
    parser.add_argument("--tokenizer-type", default="auto", choices=["auto", "t5", "llama", "sp"], help="No effect.")
    parser.add_argument("--request-id", default="")
    parser.add_argument("--prompt-embedding-table-path", type=Path)
    parser.add_argument("--prompt-task-id", type=int, default=0)
    parser.add_argument("--dtype", default="float16", choices=["float16", "float32"])
    parser.add_argument("--lora-path", type=Path, help="A folder that slipstream lora wrote.")
    parser.add_argument("--lora-task-id", type=int)
    parser.add_argument("--exclude-input-in-output", action="store_true", help="Accepted: it shows in the answer.")
    for name in ("return-log-probs", "return-context-logits", "return-generation-logits",
                 "return-kv-cache-reuse-stats"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--requested-outputs", nargs="*", default=[])
    parser.add_argument("--correctness-threshold", type=float, default=1.0, help="The share of ids that must agree.")
    return parser


def _ask(given: Namespace, connection: GrpcConnection) -> int:
    words = _words(given, connection)
    prompt = _prompt(given, words)
    print("Input sequence: ", prompt.tokens, flush=True)
    # a stop order names the request by its id, so there must be one
    request_id = given.request_id or (str(secrets.randbits(63)) if given.stop_after_ms else "")
    inputs = as_declared(_token_request(given, prompt).inputs(), connection.input_types(given.model_name))
    request = Request(given.model_name, inputs, tuple(given.requested_outputs), request_id,
                      {"Streaming": given.streaming})
    try:
        answers = list(_streamed(given, connection, request) if given.streaming
                       else _single(given, connection, request))
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
    return LocalWords(Tokenizer.load(Path(given.tokenizer_dir))) if given.tokenizer_dir else ServerWords(connection)


def _prompt(given: Namespace, words: Words | None) -> Prompt:
    if words is None:
        return Prompt(_first_row(given.input_tokens_csv), given.end_id, given.pad_id)
    return words.encode(given.text)


def _first_row(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(token) for token in next(csv.reader(file))]


def _token_request(given: Namespace, prompt: Prompt) -> TokenRequest:
    optional: dict[str, Any] = {name: getattr(given, name) for name in
                                ("repetition_penalty", "presence_penalty", "frequency_penalty")}
    optional["num_return_sequences"] = given.num_return_sequences
    for name in ("return_context_logits", "return_generation_logits", "return_kv_cache_reuse_stats"):
        optional[name] = getattr(given, name) or None
    arrays = {}
    if given.lora_path is not None:
        arrays.update(lora_arrays(given.lora_path, given.lora_task_id))
    if given.prompt_embedding_table_path is not None:
        arrays.update(prompt_table_arrays(given.prompt_embedding_table_path, given.prompt_task_id, given.dtype))
    if given.draft_tokens_csv is not None:
        import numpy

        arrays["draft_input_ids"] = numpy.array([_first_row(given.draft_tokens_csv)], dtype=numpy.int32)
    return TokenRequest(
        prompt.tokens, given.request_output_len, prompt.end_id, prompt.pad_id, given.beam_width,
        given.temperature, given.top_k, given.top_p, given.streaming, given.return_log_probs, optional, arrays,
    )


def _single(given: Namespace, connection: GrpcConnection, request: Request) -> Iterator[Answer]:
    pending = connection.infer_later(request)
    if given.stop_after_ms:
        time.sleep(given.stop_after_ms / 1000)
        if given.stop_via_request_cancel:
            pending.cancel()
        else:
            connection.infer(Request(given.model_name, stop_inputs(), request_id=request.request_id))
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
            if int(answer.outputs["sequence_length"].reshape(-1)[0]):
                yield answer
    finally:
        asking.set()


def _show(given: Namespace, words: Words | None, prompt: Prompt, answers: list[Answer]) -> int:
    if given.requested_outputs and answers:
        names = set(answers[-1].outputs)
        if names != set(given.requested_outputs):
            print(f"Encountered error: the answer holds {sorted(names)}, not {sorted(given.requested_outputs)}")
            return 1
    if given.streaming:
        beams = [[token for answer in answers for token in beams_of(answer.outputs, [])[0]]]
    else:
        beams = beams_of(answers[0].outputs, prompt.tokens)
    for position, tokens in enumerate(beams):
        if words is not None:
            print(f"Input: {given.text}")
            print(f"Output beam {position}: {words.decode(tokens) if tokens else ''}")
        print("Output sequence: ", [*prompt.tokens, *tokens])
    _show_extras(given, answers)
    if given.stop_after_ms and len(beams[0]) >= given.request_output_len:
        print("The answer was complete before the stop order came")
    return _check(given, beams[0]) if given.check_output else 0


def _show_extras(given: Namespace, answers: list[Answer]) -> None:
    wanted = {"cum_log_probs": given.return_log_probs, "output_log_probs": given.return_log_probs,
              "context_logits": given.return_context_logits, "generation_logits": given.return_generation_logits}
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
