"""Pooled states of prompts: one vector from the final hidden states of a whole prompt.

A prompt may take several steps. Kinds that use every token keep a weighted sum of the states on the
device, one for each row, until the last prompt token is computed. States are arrays of numpy, or of
torch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.engine.messages import Scores
from slipstream.engine.rows import Rows


class PoolPart(NamedTuple):
    """The tokens of a step that are pooled for one row."""

    entry: int  # index of the row in the plan
    row: int
    position: int  # position of the first of the tokens
    start: int  # index of its state among the pooled tokens of the step
    stop: int
    complete: bool  # whether the last of the tokens is the prompt's last


class PoolSelection(NamedTuple):
    tokens: np.ndarray  # indices of the pooled tokens in the step
    parts: list[PoolPart]


class Pooled(NamedTuple):
    """The vector of one row, still on the device."""

    entry: int  # index of the row in the plan
    vector: Any  # float32 [size]


def select_pooled(
    rows: Sequence[int],
    positions: np.ndarray,
    counts: np.ndarray,
    state: Rows,
    entries: Sequence[int],
    scores_first: bool = False,
) -> PoolSelection | None:
    """Return the tokens that a step of these rows pools, None if there are none.

    A row's tokens are adjacent in a step. `entries`: the index of each row in the plan.
    `scores_first`: scores come from the state of the first token, not of the last one; steps then
    have whole prompts.
    """
    if state.pooling.isdisjoint(rows):
        return None
    tokens: list[int] = []
    parts: list[PoolPart] = []
    ends = np.cumsum(counts)
    for index, row in enumerate(rows):
        position = int(positions[index])
        count = min(int(counts[index]), state.prompt_tokens[row] - position)
        if row not in state.pooling or count <= 0:
            continue
        first = int(ends[index] - counts[index])
        complete = position + count == state.prompt_tokens[row]
        skipped = 0 if state.sampling[row].pools_every_token else count - 1
        if skipped and not complete:
            continue
        chosen = range(first + skipped, first + count)
        if scores_first and state.sampling[row].pooling == "score":
            chosen = range(first, first + 1)
        begin = len(tokens)
        parts.append(
            PoolPart(entries[index], row, position + skipped, begin, begin + len(chosen), complete)
        )
        tokens += chosen
    return PoolSelection(np.array(tokens, dtype=np.int64), parts) if parts else None


def pool_states(
    states: Any,
    selection: PoolSelection,
    state: Rows,
    score: Callable[[Any], Any] | None,
) -> list[Pooled]:
    """Return the vectors of the prompts that are complete.

    states: float32 [pooled tokens, hidden]; score: the model's output layer for the kind "score"
    """
    found = []
    for part in selection.parts:
        kind = state.sampling[part.row].pooling
        values = states[part.start : part.stop]
        if kind == "score":
            assert score is not None
            vector = score(values[-1])
        elif kind == "last":
            vector = values[-1]
        else:
            weights = state.arrays.upload(_weights(kind, part))
            vector = weights @ values + state.pooled_sums.get(part.row, 0.0)
            state.pooled_sums[part.row] = vector
            vector = vector / _total_weight(kind, part.position + len(values))
        if part.complete:
            state.pooled_sums.pop(part.row, None)
            found.append(Pooled(part.entry, vector))
    return found


def _weights(kind: str, part: PoolPart) -> np.ndarray:
    """Return the weight of each token, float32 [tokens]."""
    count = part.stop - part.start
    positions = np.arange(part.position, part.position + count, dtype=np.float32)
    if kind == "weightedmean":
        return positions + 1
    return (positions == 0).astype(np.float32) if kind == "cls" else np.ones_like(positions)


def _total_weight(kind: str, tokens: int) -> float:
    """Return the sum of the weights of a prompt of this many tokens."""
    if kind == "weightedmean":
        return tokens * (tokens + 1) / 2
    return 1.0 if kind == "cls" else float(tokens)


def to_pooled_scores(found: Sequence[Pooled], state: Rows) -> dict[int, Scores]:
    """Copy vectors to the host, by plan entry. Waits for the device."""
    download = state.arrays.download
    return {one.entry: Scores(pooled=download(one.vector).tobytes()) for one in found}
