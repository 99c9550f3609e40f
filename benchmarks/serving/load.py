"""Our load generator: several processes that stream answers and measure at the socket."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.cells import COMPLETIONS, GRPC, Answer, Cell, Outcome

BENCHMARKS = Path(__file__).resolve().parents[1]
NEVER = -1  # value of end_id: no token ends the text
_START_SECONDS = 0.2  # from the last `ready` to the common start
_STREAMS_PER_PROCESS = 16  # fewer streams use fewer processes


class LoadFailed(Exception):
    """The load could not be generated."""


@dataclass(frozen=True)
class Target:
    """A server and the name of its model."""

    model: str
    http_port: int
    grpc_port: int = 0
    text_model: str = ""  # the model of generate_stream and gRPC
    usage: bool = True  # the server reports the number of tokens
    extra: dict[str, Any] = field(default_factory=dict)  # fields of its completions

    def path(self, api: str) -> str:
        if api == COMPLETIONS:
            return "/v1/completions"
        return f"/v2/models/{self.text_model}/generate_stream"


def completions_body(target: Target, cell: Cell, prompt: str, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": cell.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **cell.sampling,
        **target.extra,
    }
    return body | {"seed": seed} if cell.sampled else body


def triton_fields(cell: Cell, prompt: str, seed: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text_input": prompt,
        "max_tokens": cell.output_tokens,
        "stream": True,
        "end_id": NEVER,
    }
    return fields | cell.sampling | {"random_seed": seed} if cell.sampled else fields


def _encode(target: Target, cell: Cell, prompt: str, seed: int) -> str:
    if cell.api == COMPLETIONS:
        return json.dumps(completions_body(target, cell, prompt, seed))
    fields = triton_fields(cell, prompt, seed)
    if cell.api == GRPC:
        return base64.b64encode(infer_message(target.text_model, fields)).decode()
    return json.dumps(fields)


def infer_message(model: str, fields: dict[str, Any]) -> bytes:
    """Return a ModelInferRequest with one tensor for each field."""
    import numpy

    from slipstream.server.grpc.protocol import messages

    message = messages.ModelInferRequest(model_name=model)
    for name, value in fields.items():
        if isinstance(value, str):
            text = value.encode()
            kind = "BYTES"
            content = len(text).to_bytes(4, "little") + text
        else:
            kind, dtype = _tensor_type(name, value)
            content = numpy.array([value], dtype).tobytes()
        message.inputs.add(name=name, datatype=kind, shape=[1, 1])
        message.raw_input_contents.append(content)
    return bytes(message.SerializeToString())


def _tensor_type(name: str, value: float) -> tuple[str, str]:
    if isinstance(value, bool):
        return "BOOL", "bool"
    if isinstance(value, float):
        return "FP32", "float32"
    return ("UINT64", "uint64") if name == "random_seed" else ("INT32", "int32")


def arrivals(cell: Cell) -> list[float]:
    """Return the times of requests that arrive independently of each other (Poisson)."""
    chance = random.Random(cell.seed)
    times = [0.0]
    while len(times) < cell.requests:
        times.append(times[-1] + chance.expovariate(cell.rate))
    return times


class LoadProcesses:
    """The processes of one load. `processes` is the most; few streams need fewer."""

    def __init__(self, target: Target, cell: Cell, prompts: Sequence[str], processes: int) -> None:
        streams = cell.concurrency if not cell.rate else cell.requests
        self._count = max(1, min(processes, streams // _STREAMS_PER_PROCESS))
        self._plans = [self._plan(target, cell, prompts, number) for number in range(self._count)]
        self._processes: list[subprocess.Popen[str]] = []

    def _plan(
        self, target: Target, cell: Cell, prompts: Sequence[str], number: int
    ) -> dict[str, Any]:
        """Return the share of one process: every `count`-th request and connection."""
        mine = range(number, cell.requests, self._count)
        due = arrivals(cell)[number :: self._count] if cell.rate else []
        connections = 0 if cell.rate else len(range(number, cell.concurrency, self._count))
        return {
            "host": "127.0.0.1",
            "port": target.grpc_port if cell.api == GRPC else target.http_port,
            "path": target.path(cell.api),
            "api": cell.api,
            "tokens": cell.output_tokens,
            "bodies": [
                _encode(target, cell, prompts[index], cell.seed * 100_000 + index) for index in mine
            ],
            "connections": min(connections, len(mine)),
            "due": due,
        }

    def run(self, limit: float, started: Callable[[], Callable[[], None]]) -> Outcome:
        """Run the load and return its answers.

        `started` is called when all processes are connected. What it returns is called when the
        last answer is complete.
        """
        command = [sys.executable, "-m", "serving.load_worker"]
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            for plan in self._plans:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
                self._processes.append(process)
                self._write(process, json.dumps(plan | {"limit": limit}))
            self._expect("ready")
            begin = time.monotonic() + _START_SECONDS
            for process in self._processes:
                self._write(process, repr(begin))
            time.sleep(max(0.0, begin - time.monotonic()))
            ended = started()
            self._expect("done")
            ended()
            return self._collect()
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _expect(self, word: str) -> None:
        """Wait until every process has printed a word."""
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != f"{word}\n":
                raise LoadFailed(f"a process of the load generator ended before it was {word}")

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _collect(self) -> Outcome:
        outcome = Outcome(client_processes=self._count)
        for process in self._processes:
            assert process.stdout is not None
            found = json.loads(process.stdout.read())
            outcome.answers += [Answer(**one) for one in found["answers"]]
            outcome.client_seconds += found["cpu_seconds"]
            busy = found["cpu_seconds"] / max(found["seconds"], 1e-9)
            outcome.busiest_client = max(outcome.busiest_client, busy)
        return outcome
