"""Measure loads on a running server, and compare its greedy tokens with the offline engine's."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy

from serving.cells import Cell, Figures, ProcessTime, summarise
from serving.clients import OWN
from serving.cpu_time import CpuMeter
from serving.load import NEVER, LoadProcesses
from serving.servers import RunningServer
from serving.shapes import Prompts

_COUNTER_SECONDS = 3.0  # an engine reports its counters about once a second


def measure(
    server: RunningServer, cell: Cell, prompts: Prompts, processes: int, limit: float
) -> Figures:
    """Measure a load with our own client. The server's counter must agree on the tokens."""
    load = LoadProcesses(server.target, cell, prompts.texts, processes)
    cpu: list[ProcessTime] = []

    def started() -> Callable[[], None]:
        meter = CpuMeter(server.peer.process.pid, server.kind_of)
        return lambda: cpu.extend(meter.read())

    before = server.output_tokens()
    outcome = load.run(limit, started)
    figures = summarise(server.name, OWN, cell, outcome, cpu)
    if before is not None and not figures.errors:
        expected = before + sum(one.tokens for one in outcome.answers)
        counted = _wait_for_counter(server, expected)
        if counted != expected:
            text = f"the server counts {counted - before} tokens, not {expected - before}"
            return Figures(**{**vars(figures), "errors": [text]})
    return figures


def _wait_for_counter(server: RunningServer, expected: int) -> int:
    deadline = time.monotonic() + _COUNTER_SECONDS
    while (found := server.output_tokens() or 0) < expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def http_tokens(server: RunningServer, prompts: Prompts, tokens: int) -> list[list[int]]:
    """Return the greedy tokens of each prompt from /v1/completions, sent as text."""

    def ask(prompt: str) -> list[int]:
        body = {
            "model": server.target.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"http://127.0.0.1:{server.target.http_port}/v1/completions"
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(len(prompts.texts)) as pool:
        return list(pool.map(ask, prompts.texts))


def grpc_tokens(server: RunningServer, prompts: Prompts, tokens: int) -> list[list[int]]:
    """Return the greedy tokens of each prompt from the model `tensorrt_llm`, as a gRPC stream."""
    from slipstream.client.connection import GrpcConnection, Request
    from slipstream.server.grpc.protocol import messages

    connection = GrpcConnection(messages, f"127.0.0.1:{server.target.grpc_port}")

    def ask(prompt: Sequence[int]) -> list[int]:
        inputs = {
            "input_ids": numpy.array([prompt], numpy.int32),
            "input_lengths": numpy.array([[len(prompt)]], numpy.int32),
            "request_output_len": numpy.array([[tokens]], numpy.int32),
            "end_id": numpy.array([[NEVER]], numpy.int32),
            "streaming": numpy.array([[True]]),
        }
        found: list[int] = []
        for answer in connection.stream([Request("tensorrt_llm", inputs)]):
            if "output_ids" in answer.outputs:
                found += answer.outputs["output_ids"].reshape(-1).tolist()
        return found

    try:
        with ThreadPoolExecutor(len(prompts.tokens)) as pool:
            return list(pool.map(ask, prompts.tokens))
    finally:
        connection.close()


def agreement(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> str:
    """Return how many answers equal the reference, and where the others differ first."""
    same = [list(one) == list(other) for one, other in zip(answers, reference, strict=True)]
    text = f"{sum(same)} of {len(same)} answers equal"
    firsts = []
    for one, other, equal in zip(answers, reference, same, strict=True):
        if not equal:
            pairs = zip(one, other, strict=False)
            differing = (number for number, (a, b) in enumerate(pairs) if a != b)
            firsts.append(next(differing, min(len(one), len(other))))
    if firsts:
        text += f"; the others differ from token {min(firsts)} on or later"
    return text
