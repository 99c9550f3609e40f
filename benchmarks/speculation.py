"""What guessing ahead gains for one request at a time: tokens a second with it, over those without
it.

    python benchmarks/speculation.py MODEL [--tokens 256] [--guesses 6] [--device cpu]

Two prompts: one whose answer repeats its text (where guesses come from), and one that does not.
Same tokens in both ways, which is checked. The two ways take turns, so that a slower hour of the
machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import time

from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.llm import engine_folder
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.load import start_engine

_RECORD = '{"id": %d, "name": "item %d", "price": 10.5, "tags": ["new", "blue"], "stock": true}'
PROMPTS = {
    "repetitive": "[\n" + ",\n".join(_RECORD % (i, i) for i in range(8)) + ",\n",
    "free": "Once upon a time, in a village by the sea, there lived a clockmaker who",
}


def answer(loop: EngineLoop, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """The tokens, and how many came a second after the first."""
    loop.submit(GenerateRequest(1, prompt, SamplingParams(max_tokens=tokens)))
    found: list[int] = []
    began, first = 0.0, 0
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None and outputs.tokens:
            if not found:
                began, first = time.perf_counter(), len(outputs.tokens)
            found += outputs.tokens
    return found, (len(found) - first) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--guesses", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    folder = engine_folder(given.model, "auto", None)
    tokenizer = Tokenizer.load(folder)
    ways = {}
    for guesses in (0, given.guesses):
        settings = EngineSettings(
            device=given.device, reuse=False, max_rows=1, lookup_tokens=guesses
        )
        ways[guesses] = start_engine(folder, cpu_probe.prepare(settings))
    print(
        f"{'prompt':12} {'plain':>10} {'guessing':>10} {'ratio':>7} {'right':>7} {'tokens a step':>14}"
    )
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode(text)
        rates: dict[int, list[float]] = {guesses: [] for guesses in ways}
        texts = {}
        before = ways[given.guesses].stats()
        for _ in range(given.rounds):
            for guesses, loop in ways.items():
                texts[guesses], rate = answer(loop, prompt, given.tokens)
                rates[guesses].append(rate)
        assert texts[0] == texts[given.guesses], "guessing must not change the text"
        after = ways[given.guesses].stats()
        tried = after.draft_tokens - before.draft_tokens
        right = (
            (after.accepted_draft_tokens - before.accepted_draft_tokens) / tried if tried else 0.0
        )
        tokens_a_step = (after.output_tokens - before.output_tokens) / (after.steps - before.steps)
        plain, guessing = (statistics.median(rates[guesses]) for guesses in (0, given.guesses))
        print(
            f"{name:12} {plain:8.1f}/s {guessing:8.1f}/s {guessing / plain:6.2f}x {right:6.0%} {tokens_a_step:14.2f}"
        )


if __name__ == "__main__":
    main()
