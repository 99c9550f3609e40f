"""Constraints on the text of answers, made in a thread beside the step loop. No torch here.

A request that asks for one waits here until it is made, then goes to the scheduler with it. What
cannot be made is told as the request's error, before anything of it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import reduce
from itertools import takewhile
from operator import and_
from typing import NamedTuple

from slipstream.engine.constraints.bad_words import BadTexts, Spelling
from slipstream.engine.constraints.guided import GuideError, Guides
from slipstream.engine.constraints.stop_words import StopTexts
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.request import Constraint, GenerateRequest, SamplingParams

NO_VOCABULARY = "this engine knows no texts of its tokens: its tokenizer is missing, or of a kind that cannot be guided"


class Made(NamedTuple):
    request: GenerateRequest
    constraint: Constraint | None
    problem: str  # why there is none


class Constraints:
    def __init__(self, read_vocabulary: Callable[[], Vocabulary | None] = lambda: None) -> None:
        self._read_vocabulary = read_vocabulary
        self._executor: ThreadPoolExecutor | None = None  # most engines never need its thread
        self._making: dict[int, tuple[GenerateRequest, Future[Constraint]]] = {}
        self._guides: Guides | None = None
        self._spelling: Spelling | None = None
        self._vocabulary: Vocabulary | None = None

    def __len__(self) -> int:
        return len(self._making)

    def begin(self, request: GenerateRequest) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._making[request.request_id] = (
            request,
            self._executor.submit(self._make, request.sampling),
        )

    def drop(self, request_id: int) -> bool:
        """Forget a request; whether it was here."""
        request, future = self._making.pop(request_id, (None, None))
        if future is not None:
            future.cancel()  # unless the thread is at it
        return request is not None

    def take_late(self, now: float) -> list[int]:
        """Those whose deadline has passed meanwhile, forgotten."""
        late = [
            number
            for number, (request, _) in self._making.items()
            if (request.deadline or math.inf) <= now
        ]
        for request_id in late:
            self.drop(request_id)
        return late

    def take_made(self) -> list[Made]:
        """Those that need not wait any longer, in the order they came."""
        # one thread makes them in turn
        done = list(takewhile(lambda pair: pair[1].done(), self._making.values()))
        for request, _ in done:
            del self._making[request.request_id]
        return [_made(request, future) for request, future in done]

    def wait(self, seconds: float) -> None:
        """Until one is made, or for this long."""
        if self._making:
            wait([future for _, future in self._making.values()], seconds, FIRST_COMPLETED)

    def _make(self, sampling: SamplingParams) -> Constraint:
        """In the thread."""
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        if self._vocabulary is None:
            raise GuideError(NO_VOCABULARY)
        parts: list[Constraint] = []
        if sampling.guide is not None:
            self._guides = self._guides or Guides(self._vocabulary)
            parts.append(self._guides.open(sampling.guide, sampling.end_ids))
        if sampling.bad_texts:
            self._spelling = self._spelling or Spelling(self._vocabulary)
            parts.append(BadTexts(self._spelling, [text.encode() for text in sampling.bad_texts]))
        if sampling.stop_texts:
            parts.append(
                StopTexts(self._vocabulary, [text.encode() for text in sampling.stop_texts])
            )
        return parts[0] if len(parts) == 1 else All(parts)


class All:
    """What several constraints allow together."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = parts

    @property
    def error(self) -> str:
        return next((part.error for part in self._parts if part.error), "")

    def mask(self, tokens: list[int]) -> bytes:
        masks = [mask for part in self._parts if (mask := part.mask(tokens))]
        allowed = reduce(and_, (int.from_bytes(mask, "little") for mask in masks), -1)
        return allowed.to_bytes(len(masks[0]), "little") if masks else b""

    def complete(self, tokens: list[int]) -> bool:
        return any(part.complete(tokens) for part in self._parts)


def _made(request: GenerateRequest, future: Future[Constraint]) -> Made:
    problem = future.exception()
    if problem is None:
        return Made(request, future.result(), "")
    if isinstance(problem, GuideError):
        return Made(request, None, str(problem))
    return Made(request, None, f"the constraint on the answer could not be made: {problem}")
