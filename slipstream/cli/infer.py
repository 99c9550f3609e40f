"""`slipstream infer`: send one prompt, print the text as it comes."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.keys import read_api_key
from slipstream.cli.log import VerboseOption, log
from slipstream.client.connection import HttpConnection, ServerError, grpc_error_text


class Protocol(StrEnum):
    HTTP = "http"
    GRPC = "grpc"


def infer(
    model: Annotated[str, typer.Option("-m", "--model", help="The model to ask.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask it.")],
    protocol: Annotated[
        Protocol, typer.Option("-i", "--protocol", help="How to ask.")
    ] = Protocol.HTTP,
    url: Annotated[str, typer.Option("-u", "--url", help="The server's host.")] = "localhost",
    port: Annotated[
        int | None, typer.Option("-p", "--port", help="8000, or 8001 with grpc.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="The longest answer, in tokens.")
    ] = 128,
    api_key: Annotated[
        Path | None,
        typer.Option(
            "--api-key", help="A file with the server's key; else SLIPSTREAM_API_KEY is it."
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    key = read_api_key(api_key)
    if protocol is Protocol.HTTP:
        pieces = stream_http(f"{url}:{port or 8000}", model, prompt, max_tokens, key)
    else:
        pieces = stream_grpc(f"{url}:{port or 8001}", model, prompt, max_tokens, key)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        # leaving closes the connection, and the server stops generating
        raise typer.Exit(130) from None
    except ServerError as error:
        log("ERROR", str(error))
        raise typer.Exit(1) from None
    finally:
        sys.stdout.write("\n")


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
    import grpc

    from slipstream.server.grpc.protocol import messages

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream(
            f"/{messages.SERVICE}/ModelStreamInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )
        request = messages.ModelInferRequest(model_name=model)
        text = prompt.encode()
        _add_input(request, "text_input", "BYTES", struct.pack("<I", len(text)) + text)
        _add_input(request, "max_tokens", "INT32", struct.pack("<i", max_tokens))
        _add_input(request, "stream", "BOOL", b"\x01")
        try:
            for answer in call(
                iter([request]), metadata=[("authorization", f"Bearer {key}")] if key else []
            ):
                if answer.error_message:
                    raise ServerError(answer.error_message)
                yield _text_output(answer.infer_response)
        except grpc.RpcError as error:
            raise ServerError(grpc_error_text(error, address)) from error


def _add_input(request: Any, name: str, datatype: str, raw: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
    request.raw_input_contents.append(raw)


def _text_output(response: Any) -> str:
    outputs = zip(response.outputs, response.raw_output_contents, strict=True)
    for output, raw in outputs:
        if output.name == "text_output":
            return bytes(raw[4:]).decode(errors="replace")  # one element behind its length
    return ""
