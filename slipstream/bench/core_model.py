"""Load on an engine model, as benchmark_core_model.py generates it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy

from slipstream.bench.core_model_report import Sample
from slipstream.bench.prompts import TokenPrompt, delays
from slipstream.client.connection import Answer, Connection, GrpcConnection, Request
from slipstream.client.tensors import scalar
from slipstream.client.token_request import as_declared

WARM_UPS = 10
WARM_UP_LENGTH = 100


@dataclass(frozen=True)
class CoreModelLoad:
    models: Sequence[str]  # engine models that receive the requests in turn
    concurrency: int
    request_rate: float  # requests a second; not over 0: no delays
    delay_distribution: str
    decoupled: bool = False  # requests use the gRPC stream
    stream_timeout: float | None = None
    answers_hold_prompt: bool = True


class CoreModelClient:
    """Sends prompts to the engine models of a server and times the answers."""

    def __init__(self, connection: Connection, load: CoreModelLoad) -> None:
        self._connection = connection
        self._load = load
        self._declared = {name: connection.input_types(name) for name in load.models}

    def warm_up(self, prompt: TokenPrompt) -> None:
        for number in range(WARM_UPS):
            short = TokenPrompt(prompt.tokens, WARM_UP_LENGTH)
            self._send(short, number, time.monotonic())

    def measure(self, prompts: Sequence[TokenPrompt]) -> list[Sample]:
        """Send every prompt once and return the samples in their order."""
        load = self._load
        generator = numpy.random.default_rng(1)
        waits = delays(len(prompts), load.request_rate, load.delay_distribution, generator)
        with ThreadPoolExecutor(load.concurrency) as pool:
            pending = []
            for number, (prompt, wait) in enumerate(zip(prompts, waits, strict=True)):
                threading.Event().wait(wait)
                pending.append(pool.submit(self._send, prompt, number, time.monotonic()))
            return [future.result() for future in pending]

    def _send(self, prompt: TokenPrompt, number: int, sent: float) -> Sample:
        model = self._load.models[number % len(self._load.models)]
        inputs = {
            "input_ids": numpy.array([prompt.tokens], dtype=numpy.int32),
            "input_lengths": scalar(len(prompt.tokens)),
            "request_output_len": scalar(prompt.output_length),
            "end_id": scalar(-1),
        }
        declared = as_declared(inputs, self._declared[model])
        answers = self._infer(Request(model, declared, request_id=str(number)))
        count = sum(answer.outputs["output_ids"].shape[2] for answer in answers)
        if self._load.answers_hold_prompt and count >= len(prompt.tokens):
            count -= len(prompt.tokens)
        return Sample(sent, time.monotonic(), len(prompt.tokens), count)

    def _infer(self, request: Request) -> list[Answer]:
        if not self._load.decoupled:
            return [self._connection.infer(request)]
        assert isinstance(self._connection, GrpcConnection)
        stream = self._connection.stream([request], self._load.stream_timeout)
        return [answer for answer in stream if answer.outputs]
