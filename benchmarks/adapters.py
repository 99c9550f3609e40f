"""What adapters cost: requests that each have an adapter of their own, beside the same requests
without.

    python benchmarks/adapters.py [--shape llama3-8b] [--adapters 100] [--rank 8] [--modules attention]

Random weights and adapters, greedy, all requests at once, through the offline engine. Rounds take
turns, so that what else the machine does hurts both alike; the loss is of the medians. The goal is
at most 25% on a GPU, 40% on a CPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.request import GenerateRequest, SamplingParams
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


def run(loop: Any, requests: list[GenerateRequest]) -> tuple[float, float]:
    """Tokens a second, and a second of the process's CPU time, once prompts are over and everybody
    writes.
    """
    for request in requests:
        loop.submit(request)
    tokens, began, used, waiting = 0, 0.0, 0.0, {request.request_id for request in requests}
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
            began, used = time.perf_counter(), time.process_time()
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help="llama3-8b on a GPU, smollm2-135m on a CPU unless given"
    )
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--modules", choices=MODULES, action="append", help="what they adapt; all kinds in turn"
    )
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of a CPU; all cores unless given")
    options = parser.parse_args()
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

        settings = cpu_probe.prepare(settings)  # before torch is loaded, which reads what it sets
    import torch

    from slipstream.engine.start import create_engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = options.shape or ("llama3-8b" if device == "cuda" else "smollm2-135m")
    spec = SHAPES[shape]
    loop = create_engine(spec, random_tensors(spec, device), settings, spec.max_positions)
    print(
        f"{shape} in {loop.info.dtype} on {device}: {options.adapters} requests, {options.prompt} tokens in, "
        f"{options.output} out; each with an adapter of rank {options.rank}"
    )
    numbers = iter(range(10**9))
    chance = random.Random(0)
    for kind in options.modules or MODULES:
        sources = [
            random_source(spec, options.rank, MODULES[kind], seed)
            for seed in range(options.adapters)
        ]

        def requests(
            adapted: bool, first: int, sources: list[AdapterSource] = sources
        ) -> list[GenerateRequest]:
            prompts = [
                [chance.randrange(spec.vocab_size) for _ in range(options.prompt)] for _ in sources
            ]
            sampling = SamplingParams(max_tokens=options.output)
            return [
                GenerateRequest(
                    next(numbers),
                    prompt,
                    sampling,
                    adapter=(first + index) * adapted,
                    adapter_source=source if adapted else None,
                )
                for index, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
            ]

        first = 1 + next(numbers)
        for adapted in (True, False):
            run(loop, requests(adapted, first))
        rates: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.rounds):
            for adapted in rates:
                rates[adapted].append(run(loop, requests(adapted, first)))
        (base, base_cpu), (own, own_cpu) = (
            [statistics.median(figures) for figures in zip(*rates[adapted], strict=True)]
            for adapted in (False, True)
        )
        busy = "" if device == "cuda" else f"   by CPU time {1 - own_cpu / base_cpu:6.1%}"
        print(
            f"{kind:9}  base {base:9.1f} tok/s   adapters {own:9.1f} tok/s   loss {1 - own / base:6.1%}{busy}",
            flush=True,
        )
    loop.check_integrity()


if __name__ == "__main__":
    main()
