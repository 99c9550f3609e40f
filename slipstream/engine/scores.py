"""Scores of a prompt: the logits at its positions, or the log-probability of the token that follows
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.engine.messages import Scores
from slipstream.engine.rows import Rows
from slipstream.kernels.sampling import largest

_VALUES_AT_ONCE = 1 << 17  # their exponentials fit into a cache of the processor


class PromptPart(NamedTuple):
    """The logits of a step that belong to one row's prompt."""

    entry: int  # index of the row in the plan
    row: int
    position: int  # position of the first scored token
    start: int  # index of its logits among those of the step
    stop: int


class LogitSelection(NamedTuple):
    """The tokens of a step whose logits are computed, and what the logits are for."""

    tokens: np.ndarray  # indices of the tokens in the step
    samples: np.ndarray | None  # indices into `tokens` that rows sample from; None: all of them
    prompts: list[PromptPart]


def select_logits(
    rows: Sequence[int],
    positions: np.ndarray,
    counts: np.ndarray,
    samples: np.ndarray,
    state: Rows,
    entries: Sequence[int],
    drafts: Sequence[int] = (),
) -> LogitSelection:
    """Return the logits that a step of these rows computes. A row's tokens are adjacent in a step.

    `entries`: the index of each row in the plan. `drafts`: how many tokens each row samples besides
    its last one; empty when no row has draft tokens.
    """
    ends = np.cumsum(counts)
    if state.scoring.isdisjoint(rows) and not any(drafts):
        return LogitSelection((ends - 1)[samples], None, [])
    tokens: list[int] = []
    sampled: list[int] = []
    prompts: list[PromptPart] = []
    for index, row in enumerate(rows):
        begin = int(ends[index] - counts[index])
        position = int(positions[index])
        count = min(int(counts[index]), state.prompt_tokens[row] - position)
        if row in state.scoring and count > 0:
            prompts.append(
                PromptPart(entries[index], row, position, len(tokens), len(tokens) + count)
            )
            tokens += range(begin, begin + count)
        if samples[index]:
            first = int(ends[index]) - 1 - (drafts[index] if drafts else 0)
            tokens += range(max(first, tokens[-1] + 1 if tokens else 0), int(ends[index]))
            sampled += range(len(tokens) - (int(ends[index]) - first), len(tokens))
    return LogitSelection(
        np.array(tokens, dtype=np.int64), np.array(sampled, dtype=np.int64), prompts
    )


class PromptLogits(NamedTuple):
    """The scores that a step computed for one row's prompt: arrays of numpy; on a GPU, of torch."""

    entry: int  # index of the row in the plan
    logits: Any | None  # [positions, vocab] float32, if the request asks for them
    log_probs: Any | None  # [positions or one less]: of the token after each position
    # the likeliest tokens after each position, [positions or one less, n]: ids, log-probabilities
    top: tuple[Any, Any] | None
    ranks: Any | None  # [positions or one less]: of the token after each position, from 1


def prompt_logits(logits: np.ndarray, selection: LogitSelection, state: Rows) -> list[PromptLogits]:
    """Return the scores of prompts. `logits`: float32 [selected, vocab]."""
    return [_score_part(logits[part.start : part.stop], part, state) for part in selection.prompts]


def _score_part(values: np.ndarray, part: PromptPart, state: Rows) -> PromptLogits:
    """values: the logits of the part [positions, vocab]"""
    p = state.sampling[part.row]
    copied = values.copy() if p.context_logits else None
    if not p.prompt_log_probs:
        return PromptLogits(part.entry, copied, None, None, None)
    stop = min(part.position + len(values) + 1, state.prompt_tokens[part.row])
    # No prompt token follows the last one.
    following = state.tokens[part.row, part.position + 1 : stop]
    values = values[: len(following)]
    masses = _log_sums_exp(values)
    chosen = values[np.arange(len(following)), following]
    top = None
    if count := min(p.top_prompt_log_probs, values.shape[-1]):
        found = [largest(line, count) for line in values]
        ids = np.array(found, dtype=np.int64).reshape(-1, count)
        top = (ids, np.take_along_axis(values, ids, axis=1) - masses[:, None])
    ranks = (values >= chosen[:, None]).sum(axis=-1) if p.prompt_ranks else None
    return PromptLogits(part.entry, copied, chosen - masses, top, ranks)


def _log_sums_exp(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exp(values) of each line. values: float32 [n, vocab]"""
    masses = np.empty(len(values), dtype=np.float32)
    lines = max(1, _VALUES_AT_ONCE // max(1, values.shape[-1]))
    for start in range(0, len(values), lines):
        part = values[start : start + lines]
        tops = part.max(axis=-1)
        masses[start : start + lines] = tops + np.log(np.exp(part - tops[:, None]).sum(axis=-1))
    return masses


def to_scores(found: Sequence[PromptLogits]) -> dict[int, Scores]:
    """Return scores as bytes and lists, by plan entry. The arrays are on the host."""
    return {
        prompt.entry: Scores(
            context_logits=b"" if prompt.logits is None else prompt.logits.tobytes(),
            prompt_log_probs=[] if prompt.log_probs is None else prompt.log_probs.tolist(),
            top_prompt_log_probs=[] if prompt.top is None else _pairs(*prompt.top),
            prompt_ranks=[] if prompt.ranks is None else prompt.ranks.tolist(),
        )
        for prompt in found
    }


def _pairs(ids: np.ndarray, log_probs: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return [positions, n] tokens with their log-probabilities, one list for each position."""
    return [
        list(zip(tokens, values, strict=True))
        for tokens, values in zip(ids.tolist(), log_probs.tolist(), strict=True)
    ]
