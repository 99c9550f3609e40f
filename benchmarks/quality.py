"""Measure what fewer bits cost in quality: perplexity and likeliest tokens on real text.

    python benchmarks/quality.py MODEL [--text FILE] [--tokens 15872] [--device cuda]

MODEL: a GGUF file or a folder of weights. Engines of bfloat16, int8 and fp8 are built from it and
score the same text in windows of 512 tokens. The default text is the reference manual that comes
with Python. Agreement is the share of positions whose likeliest token is float32's, over the same
bfloat16 weights; "clear" counts positions where float32's best logit leads by more than 0.1.
Perplexity is also given relative to bfloat16's.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

import numpy as np
import torch
from tokenizers import Tokenizer

from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine
from slipstream.weights.load import start_engine

WINDOW = 512
CLEAR = 0.1


class Format(NamedTuple):
    title: str
    weight_only: str | None
    dtype: str  # type of the activations


REFERENCE = Format("float32", None, "float32")
FORMATS = [
    Format("bfloat16", None, "bfloat16"),
    Format("int8", "int8", "bfloat16"),
    Format("fp8", "fp8", "bfloat16"),
]


class Scored(NamedTuple):
    """Scores of every position except each window's last."""

    best: np.ndarray  # int [n]: the likeliest token
    lead: np.ndarray  # [n]: its logit minus the second best
    loss: np.ndarray  # [n]: minus the log-probability of the next token


def score(loop: EngineLoop, windows: list[list[int]]) -> Scored:
    parts = [
        _score_window(
            torch.frombuffer(bytearray(logits), dtype=torch.float32).view(len(window), -1), window
        )
        for window, logits in zip(windows, _context_logits(loop, windows), strict=True)
    ]
    return Scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _context_logits(loop: EngineLoop, windows: list[list[int]]) -> Iterator[bytes]:
    for number, window in enumerate(windows):
        loop.submit(
            GenerateRequest(number + 1, window, SamplingParams(max_tokens=1, context_logits=True))
        )
        found = b""
        while loop.has_work():
            outputs = loop.step()
            if outputs is not None and number + 1 in outputs.scores:
                found += outputs.scores[number + 1].context_logits
        yield found


def _score_window(logits: torch.Tensor, window: list[int]) -> Scored:
    logits = logits[:-1]
    top = logits.topk(2, dim=-1)
    next_tokens = torch.tensor(window[1:])[:, None]
    loss = -logits.double().log_softmax(dim=-1).gather(1, next_tokens)[:, 0]
    return Scored(
        top.indices[:, 0].numpy(), (top.values[:, 0] - top.values[:, 1]).numpy(), loss.numpy()
    )


def run(
    engine: Format, source: str, folder: Path, windows: list[list[int]], options: argparse.Namespace
) -> Scored:
    built = build_engine(
        source, folder / (engine.weight_only or "plain"), weight_only=engine.weight_only
    )
    settings = EngineSettings(
        dtype=engine.dtype,
        device=options.device,
        max_rows=2,
        cache_tokens=4 * WINDOW,
        reuse=False,
        max_sequence_tokens=2 * WINDOW,
    )
    loop = start_engine(built, settings)
    found = score(loop, windows)
    del loop
    gc.collect()
    return found


def text_windows(built: Path, options: argparse.Namespace) -> list[list[int]]:
    text = options.text.read_text() if options.text else "\n\n".join(topics.topics.values())
    tokens = (
        Tokenizer.from_file(str(built / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    count = min(len(tokens), options.tokens) // WINDOW
    return [tokens[number * WINDOW : (number + 1) * WINDOW] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=31 * WINDOW)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = build_engine(options.model, folder / "plain")
        windows = text_windows(built, options)
        exact = run(REFERENCE, options.model, folder, windows, options)
        clear = exact.lead > CLEAR
        print(f"{len(exact.best)} positions, {clear.mean():.1%} of them clear")
        print(
            f"{'':10} {'agreement':>10} {'if clear':>10} {'perplexity':>11} {'over bfloat16':>14}"
        )
        print(f"{'float32':10} {'':10} {'':10} {np.exp(exact.loss.mean()):11.3f}", flush=True)
        plain = 0.0
        for engine in FORMATS:
            found = run(engine, options.model, folder, windows, options)
            plain = plain or found.loss.mean()
            same = found.best == exact.best
            print(
                f"{engine.title:10} {same.mean():10.2%} {same[clear].mean():10.2%} "
                f"{np.exp(found.loss.mean()):11.3f} "
                f"{np.expm1(found.loss.mean() - plain):+14.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
