"""The workloads of `gpu.py`: lengths, sampling, published figures. No torch here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Workload:
    name: str
    requests: int
    unit: str
    prompt: tuple[float, float]  # tokens: mean and deviation, or the ends of a range
    output: tuple[float, float]
    uniform: bool = False

    def draw(self) -> list[tuple[int, int]]:
        """Return prompt and output tokens of each request. Every run has the same lengths."""
        chance = random.Random(0)

        def one(pair: tuple[float, float]) -> int:
            drawn = chance.uniform(*pair) if self.uniform else chance.gauss(*pair)
            return max(1, round(drawn))

        return [(one(self.prompt), one(self.output)) for _ in range(self.requests)]

    def limited(self, requests: int) -> Workload:
        """Return the workload with at most this many requests."""
        return replace(self, requests=min(self.requests, requests))


WORKLOADS = [
    Workload("c1", 1, "tok/s", (200, 0), (100, 0)),
    Workload("b32", 32, "tok/s", (128, 0), (128, 0)),
    Workload("thr", 1000, "tok/s", (128, 0), (128, 0)),
    Workload("long", 1000, "req/s", (1024, 0), (128, 0)),
    Workload("core", 5000, "req/s", (128, 5), (20, 2)),
    Workload("mix", 256, "tok/s", (100, 1024), (100, 1024), uniform=True),
]
# Workloads that TensorRT-LLM publishes for FP8 weights and cache on the same GPU, the short ones
# here with fewer requests.
FP8_WORKLOADS = [
    Workload("128/128", 4000, "tok/s", (128, 0), (128, 0)),
    Workload("1k/1k", 3000, "tok/s", (1000, 0), (1000, 0)),
    Workload("2k/128", 1500, "tok/s", (2048, 0), (128, 0)),
]
# shape → workload → (target, vLLM 0.26.0 on one H200)
TARGETS = {
    "llama3-8b": {
        "c1": (240, 199),
        "b32": (6500, 5131),
        "thr": (18000, 13743),
        "long": (34, 29.3),
        "core": (280, 268.5),
        "mix": (13000, 10049),
    },
    "llama2-7b": {
        "c1": (260, 213),
        "b32": (6200, 4749),
        "thr": (15500, 11293),
        "long": (27, 21.0),
        "core": (270, 244.8),
        "mix": (7500, 5348),
    },
    "qwen3-0.6b": {
        "c1": (1200, 381),
        "b32": (24000, 9194),
        "thr": (60000, 20223),
        "long": (200, 118),
        "core": (1600, 870),
        "mix": (32000, 23541),
    },
}
FP8_TARGETS = {"128/128": (28000, 27911), "1k/1k": (18000, 17744), "2k/128": (3600, 3538)}


def _every_second(index: int, vocab_size: int) -> SamplingParams:
    return _TOP_P if index % 2 else SamplingParams()


def _biased(index: int, vocab_size: int) -> SamplingParams:
    """Return a greedy request with a bias on ten tokens, spread over the vocabulary."""
    tokens = range(0, vocab_size, max(1, vocab_size // 10))
    return SamplingParams(logit_bias=tuple((token, 1.0) for token in list(tokens)[:10]))


def _always(params: SamplingParams) -> Callable[[int, int], SamplingParams]:
    return lambda index, vocab_size: params


_TOP_P = SamplingParams(temperature=0.7, top_p=0.9)
_ALL = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)
# name → sampling parameters of a request, by its index and the size of the vocabulary
SAMPLING: dict[str, Callable[[int, int], SamplingParams]] = {
    "greedy": _always(SamplingParams()),
    "temperature": _always(SamplingParams(temperature=1.0)),
    "top_p": _always(_TOP_P),
    "top_k": _always(SamplingParams(temperature=0.7, top_k=50)),
    "all": _always(_ALL),
    "typical": _always(SamplingParams(temperature=1.0, typical_p=0.9)),
    "logprobs": _always(SamplingParams(log_probs=True, top_log_probs=5)),
    "bias": _biased,
    "half": _every_second,
}


def make_requests(
    work: Workload, vocab_size: int, sampling: str, run: int, most_output: int | None = None
) -> list[GenerateRequest]:
    """Return the requests of one run of a workload.

    run: number of the run; each has prompts and ids of its own, so prefix reuse finds nothing
    most_output: limit on the output tokens of a request
    """
    chance = random.Random(run)
    choose = SAMPLING[sampling]
    requests = []
    for index, (prompt, output) in enumerate(work.draw()):
        params = replace(
            choose(index, vocab_size), max_tokens=min(output, most_output or output), seed=index
        )
        tokens = [chance.randrange(vocab_size) for _ in range(prompt)]
        requests.append(GenerateRequest(run * 10**6 + index, tokens, params))
    return requests
