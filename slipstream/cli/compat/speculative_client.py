"""The old e2e_grpc_speculative_decoding_client.py: speculative decoding with two models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import numpy

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.compat.request_flags import (
    PENALTIES,
    SAMPLING,
    add_penalties,
    add_sampling,
    add_token_ids,
)
from slipstream.cli.connections import closing_connection, connect_grpc
from slipstream.client.connection import Connection, Request
from slipstream.client.tensors import Array, scalar
from slipstream.client.text_models import postprocess, preprocessing_inputs, token_arrays
from slipstream.client.token_request import beam_tokens


def create_parser() -> Parser:
    parser = Parser(
        "e2e_grpc_speculative_decoding_client.py",
        "Generate text with a draft model and a target model.",
    )
    add = parser.add_argument
    add("-p", "--prompt", required=True, help="Prompt.")
    add(
        "--url-target",
        "-u",
        required=True,
        metavar="HOST:PORT",
        help="gRPC address of the target model.",
    )
    add(
        "--url-draft",
        "-d",
        metavar="HOST:PORT",
        help="gRPC address of the draft model (default: --url-target).",
    )
    for name, role in (("draft", "proposes tokens"), ("target", "verifies them")):
        add(
            f"--{name}-tensorrt-llm-model-name",
            default="tensorrt_llm",
            metavar="MODEL",
            help=f"Engine model that {role}.",
        )
    for name, text in (("preprocess", "tokenises"), ("postprocess", "detokenises")):
        add(
            f"--{name}or-model-name",
            default=f"{name}ing",
            metavar="MODEL",
            help=f"Model that {text} the text.",
        )
    add_verbose(parser)
    _add_sampling(parser)
    return parser


def _add_sampling(parser: Parser) -> None:
    add = parser.add_argument
    add("--num-draft-tokens", type=int, default=5, help="Number of draft tokens per request.")
    add(
        "-o",
        "--output-len",
        type=int,
        default=100,
        metavar="TOKENS",
        help="Maximum number of tokens to generate.",
    )
    add_sampling(parser)
    add_penalties(parser)
    add_token_ids(parser)
    add("--request-id", default="1", metavar="ID", help="Id of every request.")
    add("--stop-words", nargs="+", default=[], metavar="TEXT", help="Texts that end the answer.")
    add("--bad-words", nargs="+", default=[], metavar="TEXT", help="Texts that are not generated.")
    add(
        "-b",
        "--beam-width",
        type=int,
        default=1,
        choices=[1],
        help="Draft tokens work with one beam only.",
    )


def run(given: Namespace) -> int:
    target = connect_grpc(given.url_target)
    draft = connect_grpc(given.url_draft or given.url_target)
    with closing_connection(target), closing_connection(draft):
        print(f"Final text:\n{speculate(given, target, draft)}")
    return 0


def speculate(given: Namespace, target: Connection, draft: Connection) -> str:
    """Return the prompt and the generated text."""
    prepared = _preprocess(given, target)
    tokens = [int(token) for token in prepared["INPUT_ID"][0]]
    end = len(tokens) + given.output_len
    while len(tokens) < end:
        room = end - len(tokens)
        count = min(given.num_draft_tokens, room)
        model = given.draft_tensorrt_llm_model_name
        draft_tokens = _continue(given, draft, model, prepared, tokens, count)[: room - 1]
        accepted = _continue(
            given,
            target,
            given.target_tensorrt_llm_model_name,
            prepared,
            tokens,
            len(draft_tokens) + 1,
            draft_tokens,
        )
        tokens += accepted
        if len(accepted) <= len(draft_tokens):
            break  # at a stop word or the end of the text
    return postprocess(target, *token_arrays(tokens), given.postprocessor_model_name)


def _preprocess(given: Namespace, connection: Connection) -> Mapping[str, Array]:
    inputs = preprocessing_inputs(
        [given.prompt], given.output_len, given.bad_words or [""], given.stop_words or [""]
    )
    for name in ("end_id", "pad_id"):
        if getattr(given, name) is not None:
            inputs[name.upper()] = scalar(getattr(given, name))
    return connection.infer(Request(given.preprocessor_model_name, inputs)).outputs


def _continue(
    given: Namespace,
    connection: Connection,
    model: str,
    prepared: Mapping[str, Array],
    tokens: list[int],
    count: int,
    draft_tokens: Sequence[int] = (),
) -> list[int]:
    """Return up to `count` tokens with which a model continues the tokens."""
    inputs = {
        "input_ids": numpy.array([tokens], dtype=numpy.int32),
        "input_lengths": scalar(len(tokens)),
        "request_output_len": scalar(count),
        "end_id": prepared["OUT_END_ID"],
        "pad_id": prepared["OUT_PAD_ID"],
    }
    for tensor, source in (
        ("stop_words_list", "STOP_WORDS_IDS"),
        ("bad_words_list", "BAD_WORDS_IDS"),
    ):
        if prepared[source].size and prepared[source].max() > 0:
            inputs[tensor] = prepared[source]
    for name in (*SAMPLING, *PENALTIES):
        if getattr(given, name) is not None:
            tensor = f"runtime_{name}" if name.startswith("top_") else name
            inputs[tensor] = scalar(getattr(given, name))
    if draft_tokens:
        inputs["draft_input_ids"] = numpy.array([draft_tokens], dtype=numpy.int32)
    answer = connection.infer(Request(model, inputs, request_id=given.request_id))
    return beam_tokens(answer.outputs, tokens)[0]
