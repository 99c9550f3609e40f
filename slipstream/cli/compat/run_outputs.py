"""The output of `slipstream run`: texts, or files of ids, log-probabilities and logits."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.llm import RequestOutput
    from slipstream.server.text.tokenizer import Tokenizer


def print_completions(
    given: Namespace, tokenizer: Tokenizer, prompts: list[list[int]], found: list[RequestOutput]
) -> None:
    """Print the texts, or write the files that the flags name.

    `found` holds the best completion of each prompt, whose `others` are the other beams or samples.
    """
    if given.output_csv is None and given.output_npy is None:
        for index, (prompt, best) in enumerate(zip(prompts, found, strict=True)):
            print(f'Input [Text {index}]: "{tokenizer.decode(prompt, skip_special_tokens=False)}"')
            for beam, answer in enumerate((best, *best.others)):
                print(f'Output [Text {index} Beam {beam}]: "{answer.text}"', flush=True)
    else:
        rows = []
        for prompt, best in zip(prompts, found, strict=True):
            rows += [[*prompt, *answer.tokens] for answer in (best, *best.others)]
        _write_ids(given, tokenizer, rows)
    _write_log_probs(given, found)
    if given.output_logits_npy is not None:
        _write_logits(given.output_logits_npy, found)


def _pad(rows: list[list[Any]], filler: Any) -> list[list[Any]]:
    longest = max(map(len, rows))
    return [[*row, *[filler] * (longest - len(row))] for row in rows]


def _write_ids(given: Namespace, tokenizer: Tokenizer, rows: list[list[int]]) -> None:
    import numpy

    filler = tokenizer.eos_id if tokenizer.eos_id is not None else 0
    if given.output_csv is not None:
        given.output_csv.parent.mkdir(parents=True, exist_ok=True)
        with given.output_csv.open("w", newline="") as file:
            csv.writer(file).writerows(_pad(rows, filler))
    if given.output_npy is not None:
        given.output_npy.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(given.output_npy, numpy.array(_pad(rows, filler), dtype=numpy.int32))


def _write_log_probs(given: Namespace, found: list[RequestOutput]) -> None:
    """Write arrays [prompts, beams, tokens] and [prompts, beams]."""
    import numpy

    rows: list[list[float]] = []
    for best in found:
        rows += [answer.log_probs or [] for answer in (best, *best.others)]
    if given.output_log_probs_npy is not None:
        filled = numpy.array(_pad(rows, 0.0), dtype=numpy.float32)
        shape = (len(found), len(rows) // len(found), filled.shape[-1])
        numpy.save(given.output_log_probs_npy, filled.reshape(shape))
    if given.output_cum_log_probs_npy is not None:
        sums = numpy.array([sum(row) for row in rows], dtype=numpy.float32)
        numpy.save(given.output_cum_log_probs_npy, sums.reshape(len(found), -1))


def _write_logits(path: Path, found: list[RequestOutput]) -> None:
    """Write X_context.npy [prompt tokens, vocab] and X_generation.npy [output tokens, vocab]."""
    import numpy

    stem = path.with_suffix("")
    for name in ("context", "generation"):
        arrays = [getattr(best, f"{name}_logits") for best in found]
        numpy.save(
            f"{stem}_{name}.npy",
            numpy.concatenate([array for array in arrays if array is not None]),
        )
