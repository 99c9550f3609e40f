"""Builds the constraints on the text of outputs, in a thread beside the step loop. No torch here.

A request that needs a constraint waits here until it is built, and is then scheduled with it. If it
cannot be built, the request fails before anything of it runs.
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
from slipstream.engine.request import Constraint, GenerateRequest
from slipstream.engine.sampling_params import SamplingParams

NO_VOCABULARY = (
    "this engine knows no texts of its tokens: its tokenizer is missing, or of a kind that cannot "
    "be guided"
)


class Built(NamedTuple):
    """A request whose constraint is built, or could not be."""

    request: GenerateRequest
    constraint: Constraint | None
    problem: str  # why there is no constraint


class Constraints:
    def __init__(self, read_vocabulary: Callable[[], Vocabulary | None] = lambda: None) -> None:
        self._read_vocabulary = read_vocabulary
        self._executor: ThreadPoolExecutor | None = None  # created when first needed
        # request id → the request and its constraint, in order of arrival
        self._building: dict[int, tuple[GenerateRequest, Future[Constraint]]] = {}
        self._guides: Guides | None = None
        self._spelling: Spelling | None = None
        self._vocabulary: Vocabulary | None = None

    def __len__(self) -> int:
        return len(self._building)

    def start(self, request: GenerateRequest) -> None:
        """Start to build the constraint of a request."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._building[request.request_id] = (
            request,
            self._executor.submit(self._build, request.sampling),
        )

    def drop(self, request_id: int) -> bool:
        """Remove a request; return whether it was waiting here."""
        request, future = self._building.pop(request_id, (None, None))
        if future is not None:
            future.cancel()  # has no effect if the thread has started
        return request is not None

    def take_expired(self, now: float) -> list[int]:
        """Remove and return the requests whose deadline has passed."""
        expired = [
            request_id
            for request_id, (request, _) in self._building.items()
            if (request.deadline or math.inf) <= now
        ]
        for request_id in expired:
            self.drop(request_id)
        return expired

    def take_ready(self) -> list[Built]:
        """Remove and return the requests whose constraints are done, in order of arrival."""
        # One thread builds them in order.
        done = list(takewhile(lambda pair: pair[1].done(), self._building.values()))
        for request, _ in done:
            del self._building[request.request_id]
        return [_built(request, future) for request, future in done]

    def wait(self, seconds: float) -> None:
        """Wait until a constraint is done, or for this long."""
        if self._building:
            wait([future for _, future in self._building.values()], seconds, FIRST_COMPLETED)

    def _build(self, sampling: SamplingParams) -> Constraint:
        """Build a constraint. Runs in the thread."""
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
    """The intersection of several constraints."""

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


def _built(request: GenerateRequest, future: Future[Constraint]) -> Built:
    problem = future.exception()
    if problem is None:
        return Built(request, future.result(), "")
    if isinstance(problem, GuideError):
        return Built(request, None, str(problem))
    return Built(request, None, f"the constraint on the answer could not be made: {problem}")
