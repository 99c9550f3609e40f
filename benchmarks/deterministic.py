"""The benefit and cost of `--deterministic`: answers alone and among others, and tokens per second.

    python benchmarks/deterministic.py                        # SmolLM2-135M on a CPU
    python benchmarks/deterministic.py --shape llama3-8b      # random weights on a GPU

Each prompt is answered alone, then all of them at once, greedy and sampled with a seed, by the fast
kernels and by the deterministic ones. "same" counts the answers whose tokens are equal. The cost is
the ratio of the two kinds of kernels in one run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs without an installed package
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import start as start_shape
from random_models import SHAPES

from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings

SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
_FIRST_PLAIN = 16  # the first tokens of a vocabulary are special


def run(loop: EngineLoop, requests: list[GenerateRequest]) -> tuple[dict[int, list[int]], float]:
    """Return the tokens by request, and the output tokens per second."""
    answers: dict[int, list[int]] = {request.request_id: [] for request in requests}
    began = time.perf_counter()
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        position = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            answers[request_id] += outputs.tokens[position : position + count]
            position += count
    return answers, sum(map(len, answers.values())) / (time.perf_counter() - began)


def make_requests(
    vocab_size: int, count: int, output: int, sampling: dict[str, float]
) -> list[GenerateRequest]:
    """Return requests with prompts of different lengths."""
    chance = random.Random(0)
    return [
        GenerateRequest(
            number,
            [chance.randrange(_FIRST_PLAIN, vocab_size) for _ in range(chance.randrange(8, 200))],
            SamplingParams(max_tokens=output, seed=number, **sampling),
        )
        for number in range(count)
    ]


def start(options: argparse.Namespace, deterministic: bool) -> EngineLoop:
    # Without reuse: an answer alone would otherwise take its prompt from the cache.
    settings = EngineSettings(
        dtype="bfloat16", device=options.device, deterministic=deterministic, reuse=False
    )
    if options.shape:
        return start_shape(SHAPES[options.shape], settings)
    from models import prepare_models

    from slipstream.weights.load import start_engine

    return start_engine(prepare_models().engine_bf16, settings)


def measure(
    loop: EngineLoop, options: argparse.Namespace, sampling: str
) -> tuple[int, float, float]:
    """Return the number of equal answers, and the tokens per second alone and together."""
    vocab_size = loop.scheduler.vocab_size
    requests = make_requests(vocab_size, options.prompts, options.output, SAMPLING[sampling])
    run(loop, requests[:2])  # the first step of a process is slower
    alone: dict[int, list[int]] = {}
    rates = []
    for request in requests:
        answer, rate = run(loop, [request])
        alone |= answer
        rates.append(rate)
    together, rate = run(loop, requests)
    same = sum(alone[number] == together[number] for number in alone)
    return same, sorted(rates)[len(rates) // 2], rate


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of a shape (default: SmolLM2-135M)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(default: cuda with --shape)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts (default: 16)")
    parser.add_argument(
        "--output", type=int, default=32, help="output tokens of each (default: 32)"
    )
    options = parser.parse_args()
    options.device = options.device or ("cuda" if options.shape else "cpu")
    return options


def main() -> None:
    options = parse_options()
    fast: dict[str, tuple[float, float]] = {}
    print(f"{'kernels':14} {'sampling':8} {'same':>9} {'alone':>9} {'together':>9}  tok/s, × fast")
    for deterministic in (False, True):
        loop = start(options, deterministic)
        for sampling in SAMPLING:
            same, alone, together = measure(loop, options, sampling)
            base = fast.setdefault(sampling, (alone, together))
            print(
                f"{'deterministic' if deterministic else 'fast':14} {sampling:8} "
                f"{same:3} of {options.prompts:2} {alone:9.1f} {together:9.1f}  "
                f"{alone / base[0]:.2f} {together / base[1]:.2f}",
                flush=True,
            )
        del loop


if __name__ == "__main__":
    main()
