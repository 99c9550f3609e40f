"""The gain from draft tokens by prompt lookup for one request at a time, in tokens per second.

    python benchmarks/speculation.py MODEL... [--tokens 256] [--device cpu]
    python benchmarks/speculation.py MODEL --draft-tokens 6   # in every step

The texts repeat their prompt, are lists of records, answers of a chat, or free text. Each is
generated greedily and sampled. The benchmark counts texts that draft tokens change: in float32
there are none, and in other formats two tokens that nearly tie may change places. Runs with and
without draft tokens alternate, so that other load on the machine affects both. The ratio is the
median of the rounds' ratios. That of the processor time says more on a busy machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

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
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_ARTICLE = (
    "The harbour was built in 1824 by two brothers from the north of the country. Its walls are "
    "made of grey stone that came by ship from a quarry near the mountains. In the winter of 1871 "
    "a storm destroyed the eastern wall, and the town needed eleven years to build it again. Today "
    "the harbour has a museum, a small market for fish, and a school for young sailors."
)
PROMPTS = {
    "continue records": "[\n" + ",\n".join(_RECORD % (i, i) for i in range(8)) + ",\n",
    "copy an article": f"{_ARTICLE}\n\nThe same text once more:\n\n",
    "JSON list, chat": _CHAT.format(
        "Write a JSON list of ten European countries, each with name, capital and population."
    ),
    "summary, chat": _CHAT.format(f"Summarise this text.\n\n{_ARTICLE}"),
    "question, chat": _CHAT.format("Why is the sky blue, and why is it red in the evening?"),
    "poem, chat": _CHAT.format("Write a poem about a lighthouse without any repetition."),
    "free": "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "free, facts": "The history of glass begins in ancient Mesopotamia, where craftsmen",
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


class Run(NamedTuple):
    tokens: list[int]
    rate: float  # tokens per second after the first ones
    work: float  # seconds of processor time per token


def run(loop: EngineLoop, prompt: list[int], sampling: SamplingParams) -> Run:
    """Generate one text."""
    loop.submit(GenerateRequest(1, prompt, sampling))
    found: list[int] = []
    began = ended = 0.0
    first = 0
    worked = 0.0
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None and outputs.tokens:
            ended = time.perf_counter()
            if not found:
                began = ended
                worked = time.process_time()
                first = len(outputs.tokens)
            found += outputs.tokens
    worked = time.process_time() - worked
    count = max(1, len(found) - first)
    return Run(found, count / max(ended - began, 1e-9), worked / count)


class Comparison:
    """Runs of a prompt on two engines, in turn."""

    def __init__(self, plain: EngineLoop, drafting: EngineLoop) -> None:
        self._plain = plain
        self._drafting = drafting

    def line(
        self, prompt: list[int], sampling: SamplingParams, rounds: int
    ) -> tuple[str, float, float]:
        """Return the figures of a prompt as a line of the table, the ratio, and that of the
        processor time.
        """
        pairs: list[tuple[Run, Run]] = []
        before = self._drafting.stats()
        for number in range(rounds):
            if number % 2:  # each engine is first in turn
                drafted = run(self._drafting, prompt, sampling)
                plain = run(self._plain, prompt, sampling)
            else:
                plain = run(self._plain, prompt, sampling)
                drafted = run(self._drafting, prompt, sampling)
            pairs.append((plain, drafted))
        after = self._drafting.stats()
        proposed = after.draft_tokens - before.draft_tokens
        accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
        share = f"{accepted / proposed:.0%} of {proposed // rounds}" if proposed else "none"
        changed = sum(plain.tokens != drafted.tokens for plain, drafted in pairs)
        slow = statistics.median(plain.rate for plain, _ in pairs)
        fast = statistics.median(drafted.rate for _, drafted in pairs)
        ratios = sorted(drafted.rate / plain.rate for plain, drafted in pairs)
        ratio = statistics.median(ratios)
        worked = statistics.median(plain.work / drafted.work for plain, drafted in pairs)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        tokens = len(pairs[0][0].tokens)
        text = (
            f"{tokens:6} {slow:9.1f} {fast:9.1f} {ratio:6.2f}x  {spread:13} {worked:6.2f}x  "
            f"{share:12} {changed}"
        )
        return text, ratio, worked


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", help="engine folders, or names that `slipstream import` takes"
    )
    parser.add_argument("--tokens", type=int, default=256, help="output tokens (default: 256)")
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        help="draft tokens in every step; 0: where they save time (default: 0)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: 5)")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    ratios: list[tuple[float, float]] = []
    for model in options.models:
        ratios += compare_model(engine_folder(model, "auto", None), options)
    worst = [min(column) for column in zip(*ratios, strict=True)]
    print(f"\nworst ratio {worst[0]:.2f}, of the processor time {worst[1]:.2f}")


def compare_model(folder: Path, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Print the table of a model; return the ratios of time and of processor time."""
    tokenizer = Tokenizer.load(folder)
    config = read_engine_config(folder)

    def start(**more: int | bool) -> EngineLoop:
        settings = EngineSettings(device=options.device, reuse=False, max_rows=1, **more)
        return start_engine(folder, cpu_probe.prepare(settings, config.spec))

    plain = start(adaptive_lookup=False)
    drafting = start(lookup_tokens=options.draft_tokens, adaptive_lookup=True)
    comparison = Comparison(plain, drafting)
    print(f"\n{folder.name}, {plain.info.dtype}, {plain.info.device}\n")
    print(
        f"{'text':26} {'tokens':>6} {'without/s':>9} {'with/s':>9} {'ratio':>7}  {'rounds':13} "
        f"{'work':>7}  {'accepted':12} changed texts"
    )
    ratios: list[tuple[float, float]] = []
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode(text)
        for kind, more in (("greedy", {}), ("sampled", SAMPLED)):
            sampling = SamplingParams(
                max_tokens=options.tokens, end_ids=tuple(tokenizer.end_ids), **more
            )
            line, *found = comparison.line(prompt, sampling, options.rounds)
            ratios.append((found[0], found[1]))
            print(f"{name + ', ' + kind:26} {line}", flush=True)
    plain.close()
    drafting.close()
    return ratios


if __name__ == "__main__":
    main()
