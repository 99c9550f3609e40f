"""An engine without a model, for tests of the server. Run as a script it is an engine process.

Each step appends the last token + 1 to every request, until `max_tokens`. `sampling.seed` is the
minimum duration of a step in milliseconds; seeds over 10,000 are random ones of the server. A first
prompt token of 900 or more is an order. The name of the engine folder selects how the start fails.
A request for an adapter that no request brought before is refused, as by the real engine.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.request import GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import run

RAISE = 900
HANG = 901
DIE = 902
REFUSE = 903
COUNT_FROZEN_OBJECTS = 904
ALLOCATE = 905


@dataclass
class _Running:
    request: GenerateRequest
    last: int
    given: int = 0


@dataclass
class ScriptedLoop:
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            vocab_size=1000,
            max_sequence_tokens=4096,
            max_rows=64,
            total_blocks=128,
            block_tokens=32,
            device="cpu",
            dtype="float32",
            weight_bytes=0,
            cache_bytes=0,
            load_seconds=0.0,
        )
    )
    running: dict[int, _Running] = field(default_factory=dict)
    outputs: StepOutputs = field(default_factory=StepOutputs)
    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    output_tokens: int = 0
    limited: bool = False  # only as many requests run as there are rows
    checks: int = 0
    spins: bool = False
    adapters: set[int] = field(default_factory=lambda: {0})

    def submit(self, request: GenerateRequest) -> None:
        if request.adapter_source is not None:
            self.adapters.add(request.adapter)
        if request.adapter not in self.adapters:
            self.outputs.errors[request.request_id] = f"{request.adapter_name} not found in cache"
            self._add_output(request.request_id, [], "error")
        elif request.prompt[0] == REFUSE:
            self.outputs.errors[request.request_id] = "refused by order"
            self._add_output(request.request_id, [], "error")
        elif request.prompt[0] == COUNT_FROZEN_OBJECTS:
            self._add_output(request.request_id, [gc.get_freeze_count()], "length")
        else:
            self.running[request.request_id] = _Running(request, request.prompt[-1])

    def cancel(self, request_ids: list[int], reason: str = "cancelled") -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.cancelled += 1
                self._add_output(request_id, [], reason)

    def has_work(self) -> bool:
        return bool(self.running or self.outputs.request_ids)

    def step(self) -> StepOutputs | None:
        self.steps += 1
        for running in list(self.running.values()):
            self._obey(running.request.prompt[0])
        with_rows = list(self.running.items())
        if self.limited:  # the first ones have rows; the others wait
            with_rows = with_rows[: self.info.max_rows]
        seeds = [running.request.sampling.seed for _, running in with_rows]
        time.sleep(max((seed for seed in seeds if seed < 10_000), default=0) / 1000)
        for request_id, running in with_rows:
            self._advance(request_id, running)
        outputs = self.outputs
        self.outputs = StepOutputs()
        return outputs if outputs.request_ids else None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            free_blocks=128 - len(self.running),
            total_blocks=128,
            steps=self.steps,
            finished=self.finished,
            cancelled=self.cancelled,
            output_tokens=self.output_tokens,
        )

    def check_integrity(self) -> None:
        self.checks += 1
        while self.spins:  # a loop that does not end
            pass

    def close(self) -> None:
        """There is no other rank to end."""

    def _obey(self, order: int) -> None:
        if order == RAISE:
            raise RuntimeError("raised by order")
        if order == HANG:
            time.sleep(3600)
        if order == ALLOCATE:
            bytearray(1 << 32)  # more than a limit of memory allows
        if order == DIE:
            os.kill(os.getpid(), signal.SIGKILL)

    def _advance(self, request_id: int, running: _Running) -> None:
        running.last = (running.last + 1) % 900
        running.given += 1
        self.output_tokens += 1
        done = running.given >= running.request.sampling.max_tokens
        if done:
            del self.running[request_id]
            self.finished += 1
        self._add_output(request_id, [running.last], "length" if done else "")

    def _add_output(self, request_id: int, tokens: list[int], finish_reason: str) -> None:
        self.outputs.request_ids.append(request_id)
        self.outputs.token_counts.append(len(tokens))
        self.outputs.finish_reasons.append(finish_reason)
        self.outputs.cached_tokens.append(0)
        self.outputs.tokens += tokens


def start_scripted(
    engine_folder: str, settings: EngineSettings, place: object = None
) -> ScriptedLoop:
    """Start the engine as the name of its folder says.

    `bad…` is refused, `slow…` never becomes ready, `once…` starts only the first time, and `killed…`
    is killed the first time. `rows…` runs only as many requests as it has rows, and `spin…` computes
    for ever once it is idle. Each start adds a line to the file `starts`.
    """
    starts = Path(engine_folder, "starts")
    if starts.parent.is_dir():
        with starts.open("a") as file:
            file.write("start\n")
    name = Path(engine_folder).name
    if name.startswith("bad"):
        raise ValueError("this engine folder is bad by order")
    if name.startswith("slow"):
        time.sleep(3600)
    if name.startswith("killed") and starts.read_text() == "start\n":
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("once"):
        Path(engine_folder).touch(exist_ok=False)
    return ScriptedLoop(limited=name.startswith("rows"), spins=name.startswith("spin"))


if __name__ == "__main__":
    run(start_scripted)
