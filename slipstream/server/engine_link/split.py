"""Splits the outputs of a step by the front ends whose requests they belong to, and long ones into
messages that are read one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

from slipstream.engine.messages import FRONTEND_SHIFT, Scores, StepOutputs

MAX_LOGITS_BYTES = 1 << 20  # logits of prompts in one message


@dataclass(frozen=True)
class _Part:
    """The rows of one front end."""

    index: int
    rows: list[int]
    take: Callable[[list[Any]], list[Any]]  # returns the entries of these rows


class OutputSplitter:
    """Splits outputs in a time of less than 0.1 µs per row and column.

    Most steps have the rows of the step before, so the rows of each front end are kept.
    """

    def __init__(self) -> None:
        self._request_ids: list[int] = []
        self._parts: list[_Part] = []

    def split(self, outputs: StepOutputs) -> Iterator[tuple[int, StepOutputs]]:
        """Yield each front end that has rows, with its rows in their order."""
        if outputs.request_ids != self._request_ids:
            self._request_ids = outputs.request_ids
            self._parts = _parts(outputs.request_ids)
        if len(self._parts) == 1:
            yield self._parts[0].index, outputs
            return
        single = outputs.token_counts.count(1) == len(outputs.token_counts)
        ends = [] if single else [0, *accumulate(outputs.token_counts)]
        for part in self._parts:
            yield part.index, _outputs_of(part, outputs, ends)


def split_logits(outputs: StepOutputs) -> Iterator[StepOutputs]:
    """Yield the outputs of a step in their order, where the logits of prompts are long in parts.

    A part has no tokens. The reader of a message of 100 MB could do nothing else meanwhile.
    """
    for row, request_id in enumerate(outputs.request_ids if outputs.scores else ()):
        scores = outputs.scores.get(request_id)
        if scores is None:
            continue
        logits = scores.context_logits
        cached = outputs.cached_tokens[row]
        last = max(0, len(logits) - 1) // MAX_LOGITS_BYTES * MAX_LOGITS_BYTES
        for start in range(0, last, MAX_LOGITS_BYTES):
            part = Scores(context_logits=logits[start : start + MAX_LOGITS_BYTES])
            yield StepOutputs([request_id], [0], [""], [cached], scores={request_id: part})
        scores.context_logits = logits[last:]
    yield outputs


def _parts(request_ids: list[int]) -> list[_Part]:
    rows: dict[int, list[int]] = {}
    for row, request_id in enumerate(request_ids):
        rows.setdefault(request_id >> FRONTEND_SHIFT, []).append(row)
    return [_Part(index, some, _taker(some)) for index, some in sorted(rows.items())]


def _taker(rows: list[int]) -> Callable[[list[Any]], list[Any]]:
    if len(rows) == 1:
        row = rows[0]
        return lambda column: [column[row]]
    getter = itemgetter(*rows)
    return lambda column: list(getter(column))


def _outputs_of(part: _Part, outputs: StepOutputs, ends: list[int]) -> StepOutputs:
    """Return the rows of one front end.

    `ends`: where the tokens of each row end, from row -1 on; empty: each row has one token.
    """

    def per_token(column: list[Any]) -> list[Any]:
        if not column:
            return []
        if not ends:
            return part.take(column)
        return [entry for row in part.rows for entry in column[ends[row] : ends[row + 1]]]

    def per_request(column: dict[int, Any]) -> dict[int, Any]:
        if not column:
            return {}
        return {
            request_id: value
            for request_id, value in column.items()
            if request_id >> FRONTEND_SHIFT == part.index
        }

    return StepOutputs(
        request_ids=part.take(outputs.request_ids),
        token_counts=part.take(outputs.token_counts),
        finish_reasons=part.take(outputs.finish_reasons),
        cached_tokens=part.take(outputs.cached_tokens),
        tokens=per_token(outputs.tokens),
        log_probs=per_token(outputs.log_probs),
        top_log_probs=per_request(outputs.top_log_probs),
        errors=per_request(outputs.errors),
        beams=per_request(outputs.beams),
        scores=per_request(outputs.scores),
        timings=per_request(outputs.timings),
    )
