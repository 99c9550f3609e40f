"""One request to an engine model over gRPC, with an optional stop request on the way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream.client.connection import Answer, GrpcConnection, Request
from slipstream.client.token_request import beam_tokens, stop_inputs


@dataclass(frozen=True)
class Stop:
    """When a request is stopped, and how."""

    after_seconds: float
    cancels_call: bool = False  # otherwise a stop request is sent
    on_response: Callable[[], None] = lambda: None  # called after the response to a stop request


def infer_once(connection: GrpcConnection, request: Request, stop: Stop | None) -> Iterator[Answer]:
    """Yield the one answer to a request."""
    pending = connection.infer_later(request)
    if stop is not None:
        time.sleep(stop.after_seconds)
        if stop.cancels_call:
            pending.cancel()
        else:
            connection.infer(_stop_request(request))
            stop.on_response()
    yield pending.result()


def infer_stream(
    connection: GrpcConnection, request: Request, stop: Stop | None, timeout: float | None
) -> Iterator[Answer]:
    """Yield the answers that hold new tokens, as they arrive."""
    finished = threading.Event()  # until then the stream stays open for a stop request

    def requests() -> Iterator[Request]:
        yield request
        if stop is None or finished.wait(stop.after_seconds):
            return
        if stop.cancels_call:
            stream.cancel()
        else:
            yield _stop_request(request)

    stream = connection.stream(requests(), timeout)
    try:
        for answer in stream:
            # the answer to a stop request and the final flag alone hold no tokens
            if "output_ids" in answer.outputs and any(beam_tokens(answer.outputs, [])):
                yield answer
    finally:
        finished.set()


def _stop_request(request: Request) -> Request:
    return Request(request.model, stop_inputs(), request_id=request.request_id)


def join_answers(answers: list[Answer], prompt: list[int], streamed: bool) -> list[list[int]]:
    """Return the new tokens of each sequence. The pieces of a stream are joined."""
    if not streamed:
        beams = (beam_tokens(answer.outputs, prompt) for answer in answers)
        return list(itertools.chain.from_iterable(beams))
    pieces: dict[int, list[int]] = {0: []}
    for answer in answers:
        index = answer.outputs.get("sequence_index")
        sequence = int(index.reshape(-1)[0]) if index is not None else 0
        pieces.setdefault(sequence, []).extend(beam_tokens(answer.outputs, [])[0])
    return [pieces[sequence] for sequence in sorted(pieces)]
