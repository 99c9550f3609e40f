"""Measure what fewer bits cost in quality: perplexity and likeliest tokens on real text.

    python benchmarks/quality.py MODEL [--formats bfloat16,int8,fp8] [--shuffle] [--text FILE]
        [--tokens 15872] [--device cuda]

MODEL: a GGUF file, a folder of weights or a known name. An engine of each format is built from it
and scores the same text in windows of 512 tokens. The default text is the reference manual that
comes with Python. Formats: bfloat16, int8, fp8, int4, nearest (round to nearest in the blocks of
awq and gptq), awq, gptq, as-stored (the blocks of a GGUF file), q8_0 (the file, written again).
--shuffle: quantise a Llama-like model with its channels in another order, as the default model's
are in 16 levels already: see quality_models.py.

"Same token" is the share of positions whose likeliest token is float32's, over the same bfloat16
weights; "clear" counts positions where float32's best logit leads by more than 0.1. Perplexity is
also given relative to the first format's. Standard errors are those of the means of the windows.
"Resident" is the memory of the engine's process, with torch's 0.2 GB and mapped files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

import numpy as np
import torch
from quality_models import q8_0_file, shuffled_checkpoint
from tokenizers import Tokenizer

from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine
from slipstream.weights.calibration.settings import NEAREST, Calibration
from slipstream.weights.load import start_engine
from slipstream.weights.sources.known_models import (
    KNOWN_MODELS,
    PackagedModel,
    fetch_packaged_model,
)

WINDOW = 512
CLEAR = 0.1


class Format(NamedTuple):
    title: str
    weight_only: str | None = None
    dtype: str = "bfloat16"  # type of the activations
    stored: bool = False  # keep the blocks of a GGUF file


class Engine(NamedTuple):
    """An engine as it runs: what it has scored, and what it takes."""

    scored: Scored
    disk: int  # bytes of the weights' file
    resident: int  # bytes of the process once it is ready


REFERENCE = Format("float32", dtype="float32")
FORMATS = [
    Format("bfloat16"),
    Format("int8", "int8"),
    Format("fp8", "fp8"),
    Format("int4", "int4"),
    Format("nearest", NEAREST),
    Format("awq", "awq"),
    Format("gptq", "gptq"),
    Format("as-stored", stored=True),
    Format("q8_0", stored=True),
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


def run(engine: Format, source: str, folder: Path, options: argparse.Namespace) -> Engine:
    """Build an engine, and score the text with it in a process of its own."""
    built = build_engine(
        source,
        folder / engine.title,
        dtype="auto" if engine.stored else "bfloat16",
        weight_only=None if engine.weight_only == NEAREST else engine.weight_only,
        calibration=Calibration(NEAREST) if engine.weight_only == NEAREST else None,
    )
    # a new process: memory that was freed in this one would count
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found: Engine = pool.submit(_score_engine, built, engine.dtype, options).result()
    if engine is not REFERENCE:
        shutil.rmtree(built)
    return found


def _score_engine(built: Path, dtype: str, options: argparse.Namespace) -> Engine:
    windows = text_windows(built, options)
    settings = EngineSettings(
        dtype=dtype,
        device=options.device,
        max_rows=2,
        cache_tokens=4 * WINDOW,
        reuse=False,
        max_sequence_tokens=2 * WINDOW,
    )
    loop = start_engine(built, settings)
    resident = resident_bytes()
    return Engine(score(loop, windows), (built / "rank0.engine").stat().st_size, resident)


def resident_bytes() -> int:
    """Return the resident memory of this process, with mapped files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def text_windows(built: Path, options: argparse.Namespace) -> list[list[int]]:
    text = options.text.read_text() if options.text else "\n\n".join(topics.topics.values())
    tokens = (
        Tokenizer.from_file(str(built / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    count = min(len(tokens), options.tokens) // WINDOW
    return [tokens[number * WINDOW : (number + 1) * WINDOW] for number in range(count)]


def print_row(engine: Format, found: Engine, exact: Scored, plain: Scored | None) -> None:
    clear = exact.lead > CLEAR
    same = found.scored.best == exact.best
    over = "–"
    if plain is not None:
        mean, error = mean_of_windows(found.scored.loss - plain.loss)
        over = f"{np.expm1(mean):+.2%} ± {error:.2%}"
    _, error = mean_of_windows(found.scored.loss)
    perplexity = np.exp(found.scored.loss.mean())
    print(
        f"| {engine.title} | {perplexity:.3f} ± {perplexity * error:.2f} | {over} "
        f"| {same.mean():.2%} ({same[clear].mean():.2%}) "
        f"| {found.disk / 1e6:.1f} MB | {found.resident / 1e6:.0f} MB |",
        flush=True,
    )


def mean_of_windows(losses: np.ndarray) -> tuple[float, float]:
    """Return the mean of all positions and its standard error, from the means of the windows."""
    means = losses.reshape(-1, WINDOW - 1).mean(1)
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    return float(means.mean()), float(error)


def source_of(engine: Format, options: argparse.Namespace, folder: Path) -> str:
    """Return the model that an engine is built from."""
    if engine.title == "q8_0":
        return str(q8_0_file(packaged_file(options.model), folder / "q8_0.gguf"))
    if engine.stored or not options.shuffle:
        return str(options.model)
    shuffled = folder / "shuffled"
    if not shuffled.exists():
        shuffled_checkpoint(options.model, shuffled)
    return str(shuffled)


def packaged_file(model: str) -> Path:
    """Return the GGUF file of a model."""
    known = KNOWN_MODELS.get(model)
    if isinstance(known, PackagedModel):
        return fetch_packaged_model(model, known)
    return Path(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=31 * WINDOW)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--formats", default="bfloat16,int8,fp8")
    options = parser.parse_args()
    formats = {engine.title: engine for engine in FORMATS}
    chosen = options.formats.split(",")
    if unknown := set(chosen) - formats.keys():
        parser.error(f"--formats {unknown.pop()}: choose from {', '.join(formats)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = run(REFERENCE, source_of(REFERENCE, options, folder), folder, options).scored
        clear = exact.lead > CLEAR
        perplexity = np.exp(exact.loss.mean())
        print(f"{len(exact.best)} positions, {clear.mean():.1%} clear; float32: {perplexity:.3f}\n")
        columns = ("weights", "perplexity", "over the first row", "same token (if clear)")
        print(f"| {' | '.join(columns)} | disk | resident |")
        print("|---|---|---|---|---|---|", flush=True)
        plain: Scored | None = None
        for title in chosen:
            engine = formats[title]
            found = run(engine, source_of(engine, options, folder), folder, options)
            print_row(engine, found, exact, plain)
            plain = plain or found.scored


if __name__ == "__main__":
    main()
