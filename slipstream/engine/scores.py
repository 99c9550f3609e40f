"""Scores of a prompt: the logits at each of its positions, or only what they say of the token that
follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from slipstream.engine.messages import Scores
from slipstream.engine.rows import Rows


class PromptPart(NamedTuple):
    """Logits of a step that belong to one row's prompt."""

    column: int  # of the plan
    row: int
    position: int  # of the first
    start: int  # among the step's logits
    stop: int


class Wanted(NamedTuple):
    """Which logits a step computes, and whose they are."""

    tokens: np.ndarray  # of the step, those whose logits are computed
    samples: np.ndarray | None  # among those, the ones that rows sample from; None: all of them
    prompts: list[PromptPart]


def wanted_logits(
    rows: Sequence[int],
    positions: np.ndarray,
    counts: np.ndarray,
    samples: np.ndarray,
    state: Rows,
    columns: Sequence[int],
    drafts: Sequence[int] = (),
) -> Wanted:
    """`columns`: where each row stands in the plan. A row's tokens follow one another in the step.

    `drafts`: how many tokens each row samples besides its last; none where it is empty.
    """
    ends = np.cumsum(counts)
    if state.scoring.isdisjoint(rows) and not any(drafts):
        return Wanted((ends - 1)[samples], None, [])
    tokens: list[int] = []
    sampled: list[int] = []
    prompts: list[PromptPart] = []
    for index, row in enumerate(rows):
        begin, position = int(ends[index] - counts[index]), int(positions[index])
        count = min(int(counts[index]), state.prompt_tokens[row] - position)
        if row in state.scoring and count > 0:
            prompts.append(
                PromptPart(columns[index], row, position, len(tokens), len(tokens) + count)
            )
            tokens += range(begin, begin + count)
        if samples[index]:
            first = int(ends[index]) - 1 - (drafts[index] if drafts else 0)
            tokens += range(max(first, tokens[-1] + 1 if tokens else 0), int(ends[index]))
            sampled += range(len(tokens) - (int(ends[index]) - first), len(tokens))
    return Wanted(np.array(tokens, dtype=np.int64), np.array(sampled, dtype=np.int64), prompts)


class PromptLogits(NamedTuple):
    """What a step computed for one row's prompt, still on the device."""

    column: int
    logits: Tensor | None  # [positions, vocab] float32, where they were asked for
    log_probs: Tensor | None  # [positions or one less] of the token after each


def prompt_logits(logits: Tensor, wanted: Wanted, state: Rows) -> list[PromptLogits]:
    """logits: [wanted.tokens, vocab], which the caller may overwrite afterwards."""
    found = []
    for part in wanted.prompts:
        values, sampling = logits[part.start : part.stop].float(), state.sampling[part.row]
        log_probs = None
        if sampling.prompt_log_probs:
            stop = min(part.position + len(values) + 1, state.prompt_tokens[part.row])
            # the prompt's last token has none
            following = state.tokens[part.row, part.position + 1 : stop]
            log_probs = (
                values[: len(following)].log_softmax(dim=-1).gather(-1, following[:, None])[:, 0]
            )
        own = values.clone() if sampling.context_logits else None
        found.append(PromptLogits(part.column, own, log_probs))
    return found


def to_scores(found: Sequence[PromptLogits]) -> dict[int, Scores]:
    """By the plan's column; waits for the device."""
    return {
        column: Scores(
            context_logits=b"" if logits is None else logits.cpu().numpy().tobytes(),
            prompt_log_probs=[] if log_probs is None else log_probs.tolist(),
        )
        for column, logits, log_probs in found
    }
