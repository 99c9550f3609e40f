"""The old e2e_grpc_speculative_decoding_client.py: a small model guesses, a large one keeps what it
would have said.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import numpy

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import connect_grpc
from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, texts
from slipstream.client.token_request import beams_of, scalar
from slipstream.client.words import postprocess


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    target = connect_grpc(given.url_target)
    draft = connect_grpc(given.url_draft or given.url_target)
    try:
        print(f"Final text:\n{speculate(given, target, draft, given.prompt)}")
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        target.close()
        draft.close()
    return 0


def _parser() -> Parser:
    parser = Parser(
        "e2e_grpc_speculative_decoding_client.py", description="Let one model guess for another."
    )
    parser.add_argument("-p", "--prompt", required=True, help="The prompt.")
    add_models(parser)
    return parser


def add_models(parser: Parser) -> None:
    add = parser.add_argument
    add("-v", "--verbose", action="store_true", help="No effect: all there is to say is said.")
    add("--url-target", "-u", required=True, help="The gRPC address of the model that decides.")
    add("--url-draft", "-d", help="That of the model that guesses; default: the same.")
    add("--preprocessor-model-name", default="preprocessing", help="Text to ids.")
    add("--postprocessor-model-name", default="postprocessing", help="Ids to text.")
    add("--draft-tensorrt-llm-model-name", default="tensorrt_llm", help="The model that guesses.")
    add("--target-tensorrt-llm-model-name", default="tensorrt_llm", help="The model that decides.")
    add(
        "-b",
        "--beam-width",
        type=int,
        default=1,
        choices=[1],
        help="1: guesses belong to one answer.",
    )
    for name in ("temperature", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        add(f"--{name}", type=float, help="Sent to both where it is given.")
    add("-o", "--output-len", type=int, default=100, help="The longest answer, in tokens.")
    add("--num-draft-tokens", type=int, default=5, help="Guesses at a time.")
    add("--end-id", type=int, help="Default: the tokenizer's.")
    add("--pad-id", type=int, help="Default: the tokenizer's.")
    add("--request-id", default="1", help="The id of every request.")
    add("--stop-words", nargs="+", default=[], help="The answer ends with any of them.")
    add("--bad-words", nargs="+", default=[], help="They do not come.")


def speculate(given: Namespace, target: Connection, draft: Connection, prompt: str) -> str:
    """The whole text: prompt and answer."""
    before = _preprocess(given, target, prompt)
    tokens = [int(token) for token in before["INPUT_ID"][0]]
    wanted = len(tokens) + given.output_len
    while len(tokens) < wanted:
        room = wanted - len(tokens)
        guesses = _ask(
            given,
            draft,
            given.draft_tensorrt_llm_model_name,
            before,
            tokens,
            min(given.num_draft_tokens, room),
        )[: room - 1]
        news = _ask(
            given,
            target,
            given.target_tensorrt_llm_model_name,
            before,
            tokens,
            len(guesses) + 1,
            guesses,
        )
        tokens += news
        if len(news) <= len(guesses):
            break  # an end of text or a stop word came
    ids = numpy.array([[tokens]], dtype=numpy.int32)
    lengths = numpy.array([[len(tokens)]], dtype=numpy.int32)
    return postprocess(target, ids, lengths, given.postprocessor_model_name)


def _preprocess(given: Namespace, connection: Connection, prompt: str) -> Mapping[str, Array]:
    inputs = {
        "QUERY": texts([prompt]),
        "REQUEST_OUTPUT_LEN": scalar(given.output_len),
        "BAD_WORDS_DICT": texts(given.bad_words or [""]),
        "STOP_WORDS_DICT": texts(given.stop_words or [""]),
    }
    for name in ("end_id", "pad_id"):
        if getattr(given, name) is not None:
            inputs[name.upper()] = scalar(getattr(given, name))
    return connection.infer(Request(given.preprocessor_model_name, inputs)).outputs


def _ask(
    given: Namespace,
    connection: Connection,
    model: str,
    before: Mapping[str, Array],
    tokens: list[int],
    count: int,
    guesses: Sequence[int] = (),
) -> list[int]:
    """The tokens that a model continues with."""
    inputs = {
        "input_ids": numpy.array([tokens], dtype=numpy.int32),
        "input_lengths": scalar(len(tokens)),
        "request_output_len": scalar(count),
        "end_id": before["OUT_END_ID"],
        "pad_id": before["OUT_PAD_ID"],
    }
    for tensor, source in (
        ("stop_words_list", "STOP_WORDS_IDS"),
        ("bad_words_list", "BAD_WORDS_IDS"),
    ):
        if before[source].size and before[source].max() > 0:
            inputs[tensor] = before[source]
    for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(given, name) is not None:
            inputs[name] = scalar(getattr(given, name))
    if guesses:
        inputs["draft_input_ids"] = numpy.array([guesses], dtype=numpy.int32)
    answer = connection.infer(Request(model, inputs, request_id=given.request_id))
    return beams_of(answer.outputs, tokens)[0]
