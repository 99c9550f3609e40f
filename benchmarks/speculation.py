"""The gain from draft tokens by prompt lookup for one request at a time, in tokens per second.

    python benchmarks/speculation.py MODEL [--tokens 256] [--draft-tokens 6] [--device cpu]

Two prompts: one whose continuation repeats its text, and one whose continuation does not. The
benchmark checks that draft tokens do not change the output. Runs with and without draft tokens
alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import statistics
import time

from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.llm import engine_folder
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.load import start_engine

_RECORD = '{"id": %d, "name": "item %d", "price": 10.5, "tags": ["new", "blue"], "stock": true}'
PROMPTS = {
    "repetitive": "[\n" + ",\n".join(_RECORD % (i, i) for i in range(8)) + ",\n",
    "free": "Once upon a time, in a village by the sea, there lived a clockmaker who",
}


def run(loop: EngineLoop, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """Return the output tokens, and the tokens per second after the first ones."""
    loop.submit(GenerateRequest(1, prompt, SamplingParams(max_tokens=tokens)))
    found: list[int] = []
    began = 0.0
    first = 0
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None and outputs.tokens:
            if not found:
                began = time.perf_counter()
                first = len(outputs.tokens)
            found += outputs.tokens
    return found, (len(found) - first) / (time.perf_counter() - began)


def compare(
    plain: EngineLoop, drafting: EngineLoop, prompt: list[int], tokens: int, rounds: int
) -> str:
    """Run a prompt on both engines; return the figures as a line of the table."""
    plain_rates: list[float] = []
    draft_rates: list[float] = []
    before = drafting.stats()
    for _ in range(rounds):
        expected, rate = run(plain, prompt, tokens)
        plain_rates.append(rate)
        found, rate = run(drafting, prompt, tokens)
        draft_rates.append(rate)
        assert found == expected, "draft tokens must not change the output"
    after = drafting.stats()
    proposed = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
    share = accepted / proposed if proposed else 0.0
    per_step = (after.output_tokens - before.output_tokens) / (after.steps - before.steps)
    slow = statistics.median(plain_rates)
    fast = statistics.median(draft_rates)
    return f"{slow:8.1f}/s {fast:8.1f}/s {fast / slow:6.2f}x {share:8.0%} {per_step:14.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="an engine folder, or a name that `slipstream import` takes")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens (default: 256)")
    parser.add_argument(
        "--draft-tokens", type=int, default=6, help="draft tokens per step (default: 6)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    options = parser.parse_args()
    folder = engine_folder(options.model, "auto", None)
    tokenizer = Tokenizer.load(folder)
    plain, drafting = (
        start_engine(
            folder,
            cpu_probe.prepare(
                EngineSettings(
                    device=options.device, reuse=False, max_rows=1, lookup_tokens=draft_tokens
                ),
                read_engine_config(folder).spec,
            ),
        )
        for draft_tokens in (0, options.draft_tokens)
    )
    print(
        f"{'prompt':12} {'plain':>10} {'drafts':>10} {'ratio':>7} {'accepted':>8} "
        f"{'tokens per step':>14}"
    )
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode(text)
        line = compare(plain, drafting, prompt, options.tokens, options.rounds)
        print(f"{name:12} {line}")


if __name__ == "__main__":
    main()
