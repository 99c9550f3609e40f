"""The cost of adapters: requests that each have an adapter of their own, compared with the same
requests without adapters.

    python benchmarks/adapters.py [--shape llama3-8b] [--adapters 100] [--rank 8] [--modules all]

Random weights and adapters, greedy, all requests at once, through the offline engine. Rounds with
and without adapters alternate, so that other load on the machine affects both. The loss compares
medians. The goal is at most 25% on a GPU and 40% on a CPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# makes the benchmark run from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import ModelSpec

SHAPES = {
    "smollm2-135m": ModelSpec(
        "LlamaForCausalLM", 49152, 576, 30, 9, 3, 64, 1536, 2048, tied_embeddings=True
    ),
    "llama3-8b": ModelSpec(
        "LlamaForCausalLM", 128256, 4096, 32, 32, 8, 128, 14336, 8192, rope_theta=500000.0
    ),
    "tiny": ModelSpec("LlamaForCausalLM", 96, 64, 2, 4, 2, 16, 96, 256),
}
# module numbers of the protocol
MODULES = {"attention": (1, 2, 3), "all": (1, 2, 3, 4, 5, 6, 7)}


def random_tensors(spec: ModelSpec, device: str) -> dict[str, Any]:
    import torch

    from slipstream.weights.parameters import Quantisation, engine_parameters

    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    return {
        one.name: torch.ones(one.shape, **kind)
        if len(one.shape) == 1
        else torch.randn(one.shape, **kind) * 0.02
        for one in engine_parameters(spec, Quantisation())
    }


def random_source(spec: ModelSpec, rank: int, modules: tuple[int, ...], seed: int) -> AdapterSource:
    import numpy

    sizes = {
        1: (spec.hidden_size, spec.q_size),
        2: (spec.hidden_size, spec.kv_size),
        3: (spec.hidden_size, spec.kv_size),
        4: (spec.q_size, spec.hidden_size),
        5: (spec.hidden_size, spec.ffn_size),
        6: (spec.ffn_size, spec.hidden_size),
        7: (spec.hidden_size, spec.ffn_size),
    }
    config = [(module, layer, rank) for layer in range(spec.layers) for module in modules]
    longest = rank * max(sum(sizes[module]) for module in modules)
    weights = numpy.zeros((len(config), longest), dtype=numpy.float16)
    draw = numpy.random.default_rng(seed)
    noise = (draw.standard_normal(longest) * 0.02).astype(numpy.float16)
    for row, (module, *_) in zip(weights, config, strict=True):
        row[: rank * sum(sizes[module])] = numpy.roll(noise, module)[: rank * sum(sizes[module])]
    return AdapterSource(weights=weights.tobytes(), datatype="float16", modules=config)


def make_requests(
    spec: ModelSpec,
    options: argparse.Namespace,
    sources: list[AdapterSource],
    first_id: int,
    first_adapter: int,
) -> list[GenerateRequest]:
    """Return one request per adapter, with a random prompt and the number of its adapter."""
    chance = random.Random(first_id)
    sampling = SamplingParams(max_tokens=options.output)
    requests = []
    for index, source in enumerate(sources):
        prompt = [chance.randrange(spec.vocab_size) for _ in range(options.prompt)]
        requests.append(
            GenerateRequest(
                first_id + index,
                prompt,
                sampling,
                adapter=first_adapter + index,
                adapter_source=source,
            )
        )
    return requests


def without_adapters(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(request, adapter=0, adapter_source=None) for request in requests]


def run(loop: Any, requests: list[GenerateRequest]) -> tuple[float, float]:
    """Return tokens per second and per second of CPU time, from when all prompts are computed."""
    for request in requests:
        loop.submit(request)
    tokens = 0
    began = 0.0
    used = 0.0
    waiting = {request.request_id for request in requests}
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        if outputs.errors:
            raise SystemExit(f"a request failed: {next(iter(outputs.errors.values()))}")
        if began:
            tokens += len(outputs.tokens)
        waiting.difference_update(outputs.request_ids)
        if not waiting and not began:
            began = time.perf_counter()
            used = time.process_time()
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - used)


def compare(
    loop: Any, spec: ModelSpec, options: argparse.Namespace, kind: str, on_gpu: bool, first_id: int
) -> str:
    """Run requests with and without adapters of one kind; return the figures as a line."""
    sources = [
        random_source(spec, options.rank, MODULES[kind], seed) for seed in range(options.adapters)
    ]
    base_rates: list[tuple[float, float]] = []
    adapter_rates: list[tuple[float, float]] = []
    for number in range(1 + options.rounds):
        round_id = first_id + number * options.adapters
        # An engine knows an adapter by its number: the same in all rounds, others for each kind.
        requests = make_requests(spec, options, sources, round_id, first_adapter=first_id)
        adapter_rates.append(run(loop, requests))
        base_rates.append(run(loop, without_adapters(requests)))
    # The first round only warms up.
    base, base_cpu = (statistics.median(rates) for rates in zip(*base_rates[1:], strict=True))
    own, own_cpu = (statistics.median(rates) for rates in zip(*adapter_rates[1:], strict=True))
    by_cpu_time = "" if on_gpu else f"   by CPU time {1 - own_cpu / base_cpu:6.1%}"
    return (
        f"{kind:9}  base {base:9.1f} tok/s   adapters {own:9.1f} tok/s   "
        f"loss {1 - own / base:6.1%}{by_cpu_time}"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        help="shape of the model (default: llama3-8b on a GPU, smollm2-135m on a CPU)",
    )
    parser.add_argument(
        "--adapters", type=int, default=100, help="adapters and requests (default: 100)"
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: 8)")
    parser.add_argument(
        "--modules", choices=MODULES, action="append", help="modules to adapt (default: each kind)"
    )
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens (default: 32)")
    parser.add_argument("--output", type=int, default=64, help="output tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default: 5)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    settings = EngineSettings(
        max_rows=options.adapters,
        reuse=False,
        max_sequence_tokens=options.prompt + options.output,
        cache_tokens=options.adapters * (options.prompt + options.output + 32),
        adapter_host_bytes=16 * 2**30,
        adapter_page_rank=min(options.rank, 64),
        adapter_max_rank=max(options.rank, 64),
        adapter_memory_fraction=0.5,
        threads=options.threads,
    )
    if not Path("/dev/nvidiactl").exists():
        from slipstream.engine_worker import cpu_probe

        settings = cpu_probe.prepare(settings)  # sets variables that torch reads when it is loaded
    import torch

    from slipstream.engine.start import create_engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = options.shape or ("llama3-8b" if device == "cuda" else "smollm2-135m")
    spec = SHAPES[shape]
    loop = create_engine(spec, random_tensors(spec, device), settings, spec.max_positions)
    print(
        f"{shape} in {loop.info.dtype} on {device}: {options.adapters} requests, "
        f"{options.prompt} tokens in, {options.output} out; each with an adapter of rank "
        f"{options.rank}"
    )
    for index, kind in enumerate(options.modules or MODULES):
        first_id = 1 + index * 10**6
        print(compare(loop, spec, options, kind, device == "cuda", first_id), flush=True)
    loop.check_integrity()


if __name__ == "__main__":
    main()
