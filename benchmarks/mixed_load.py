"""Throughput against inter-token latency while long prompts arrive, by target latency.

    python benchmarks/mixed_load.py --shape llama3-8b             # on a GPU
    python benchmarks/mixed_load.py --shape tiny --device cpu     # less than a minute

Streams decode all the time, and a prompt arrives `--rate` times a second, or as soon as the last
one has ended. Random weights, greedy, no reuse, through the offline engine. One engine runs all
targets; "off" is no target, the default: prompts are spread over steps on a GPU, and take the whole
token budget on a CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

import torch
from gpu import start
from random_models import SHAPES

from slipstream.engine.loop import EngineLoop
from slipstream.engine.messages import StepOutputs
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.step_budget import PromptLimits, StepBudget
from slipstream.model.spec import ModelSpec

# wider than the "tiny" of other benchmarks, so that a long prompt takes a while
SMALL = ModelSpec("LlamaForCausalLM", 2048, 256, 4, 8, 4, 32, 704, 8192)
STREAM_PROMPT = 128
STREAM_TOKENS = 4096  # of a stream, with its prompt
ANSWER = 8  # output tokens of a long prompt
_FIRST_PROMPT_ID = 10**6


@dataclass
class Measured:
    """The times of one run, in seconds."""

    gaps: list[float] = field(default_factory=list)  # between two tokens of a stream
    first_tokens: list[float] = field(default_factory=list)  # of a long prompt, from its arrival
    stream_tokens: int = 0
    prompts: int = 0  # long prompts that have ended


class Load:
    """Streams and long prompts on one engine."""

    def __init__(self, loop: EngineLoop, options: argparse.Namespace) -> None:
        self.loop = loop
        self.options = options
        self.measured = Measured()
        self._chance = random.Random(0)
        self._last: dict[int, float] = {}  # stream → time of its last token
        self._arrived: dict[int, float] = {}  # long prompt without an answer → its arrival
        self._live_prompts = 0
        self._next_id = 0
        self._next_prompt_id = _FIRST_PROMPT_ID

    def run(self, seconds: float) -> Measured:
        """Run for this long, after the streams have begun to decode. All requests then end."""
        for _ in range(self.options.streams):
            self._start_stream()
        while len(self._last) < self.options.streams:
            self._step()
        self.measured = Measured()
        began = time.perf_counter()
        arrivals = 0
        while (now := time.perf_counter()) - began < seconds:
            rate = self.options.rate
            if (now - began) * rate >= arrivals if rate else self._live_prompts == 0:
                self._start_prompt(now)
                arrivals += 1
            self._step()
        found = self.measured
        self.loop.cancel([*self._last, *range(_FIRST_PROMPT_ID, self._next_prompt_id)])
        while self.loop.has_work():
            self.loop.step()
        return found

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(self.loop.info.vocab_size) for _ in range(count)]

    def _start_stream(self) -> None:
        sampling = SamplingParams(max_tokens=STREAM_TOKENS - STREAM_PROMPT)
        self.loop.submit(GenerateRequest(self._next_id, self._tokens(STREAM_PROMPT), sampling))
        self._next_id += 1

    def _start_prompt(self, now: float) -> None:
        request = GenerateRequest(
            self._next_prompt_id,
            self._tokens(self.options.prompt),
            SamplingParams(max_tokens=ANSWER),
        )
        self._arrived[self._next_prompt_id] = now
        self._live_prompts += 1
        self._next_prompt_id += 1
        self.loop.submit(request)

    def _step(self) -> None:
        outputs = self.loop.step()
        if outputs is not None:
            self._take(outputs, time.perf_counter())

    def _take(self, outputs: StepOutputs, now: float) -> None:
        for request_id, count, reason in zip(
            outputs.request_ids, outputs.token_counts, outputs.finish_reasons, strict=True
        ):
            if request_id >= _FIRST_PROMPT_ID:
                if count and request_id in self._arrived:
                    self.measured.first_tokens.append(now - self._arrived.pop(request_id))
                if reason:
                    self._live_prompts -= 1
                    self.measured.prompts += 1
                continue
            self.measured.stream_tokens += count
            if request_id in self._last:
                self.measured.gaps.append(now - self._last[request_id])
            self._last[request_id] = now
            if reason:
                del self._last[request_id]
                self._start_stream()


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; nan without values."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(target: float | None, found: Measured, seconds: float, prompt: int) -> str:
    """Return a run's line of the table."""
    name = "off" if target is None else f"{target:g}"
    cells = [
        f"{name:>9}",
        f"{found.stream_tokens / seconds:10.0f}",
        f"{found.prompts * prompt / seconds:12.0f}",
        *(f"{1e3 * percentile(found.gaps, share):8.1f}" for share in (0.5, 0.99, 1.0)),
        *(f"{1e3 * percentile(found.first_tokens, share):9.0f}" for share in (0.5, 0.99)),
    ]
    return " ".join(cells)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default: cuda)")
    parser.add_argument("--streams", type=int, default=32, help="running streams (default: 32)")
    parser.add_argument(
        "--prompt", type=int, default=8000, help="tokens of a long prompt (default: 8000)"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="long prompts per second; 0: the next one when the last has ended (default: 0)",
    )
    parser.add_argument(
        "--targets",
        default="off,100,50,25,15",
        help="target latencies in milliseconds (default: off,100,50,25,15)",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each run (default: 5)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    spec = SMALL if options.shape == "tiny" else SHAPES[options.shape]
    longest = options.prompt + STREAM_TOKENS
    settings = EngineSettings(
        dtype="bfloat16" if options.device == "cuda" else "float32",
        device=options.device,
        max_rows=2 * options.streams,
        max_sequence_tokens=longest,
        cache_tokens=2 * options.streams * STREAM_TOKENS + 4 * longest,
        reuse=False,
    )
    loop = start(spec, settings)
    print(
        f"{options.shape} on {loop.info.device}, {options.streams} streams, prompts of "
        f"{options.prompt} tokens, "
        + (f"{options.rate:g} per second" if options.rate else "one after the other")
    )
    Load(loop, options).run(options.seconds / 4)  # first calls take longer
    print("target ms stream tok/s prompt tok/s  ITL p50      p99      max  TTFT p50       p99")
    for text in options.targets.split(","):
        target = None if text == "off" else float(text)
        scheduler = loop.scheduler
        budget = None if target is None else StepBudget(target / 1e3, scheduler.step_tokens)
        scheduler.prompt_limits = PromptLimits(budget, scheduler.prompt_limits.spread)
        found = Load(loop, options).run(options.seconds)
        print(line(target, found, options.seconds, options.prompt), flush=True)
    if options.device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory")


if __name__ == "__main__":
    main()
