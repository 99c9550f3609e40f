"""`slipstream infer`: send one prompt and print the text as it arrives."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import PORTS, add_address, add_api_key, add_protocol, server_address
from slipstream.cli.keys import read_api_key
from slipstream.client.connection import GrpcConnection, HttpConnection, Request, ServerError


def create_parser() -> Parser:
    parser = Parser("slipstream infer", "Send one prompt to a running server and print the answer.")
    parser.add_argument("-m", "--model", required=True, help="Name of the model.")
    parser.add_argument("--prompt", required=True, help="Text to complete.")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="Maximum number of tokens to generate."
    )
    add_protocol(parser, "http")
    add_api_key(parser)
    add_address(parser, "8000, or 8001 with -i grpc")
    return parser


def run(given: Namespace) -> int:
    stream = stream_http if given.protocol == "http" else stream_grpc
    address = server_address(given, PORTS[given.protocol])
    key = read_api_key(given.api_key)
    try:
        for piece in stream(address, given.model, given.prompt, given.max_tokens, key):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # the connection is closed, and the server stops generating
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        sys.stdout.write("\n")
    return 0


def stream_http(
    address: str, model: str, prompt: str, max_tokens: int, key: str = ""
) -> Iterator[str]:
    with closing(HttpConnection(address, key)) as connection:
        body = {"text_input": prompt, "max_tokens": max_tokens, "stream": True}
        for event in connection.events(f"/v2/models/{model}/generate_stream", body):
            text = event.get("text_output", "")
            yield text if isinstance(text, str) else "\n".join(str(one) for one in text)


def stream_grpc(
    address: str, model: str, prompt: str, max_tokens: int, key: str = ""
) -> Iterator[str]:
    from slipstream.client.tensors import first_text, scalar, texts
    from slipstream.server.grpc.protocol import messages

    inputs = {
        "text_input": texts([prompt]),
        "max_tokens": scalar(max_tokens),
        "stream": scalar(True),
    }
    with closing(GrpcConnection(messages, address, key=key)) as connection:
        for answer in connection.stream([Request(model, inputs)]):
            text = answer.outputs.get("text_output")
            if text is not None:
                yield first_text(text)
