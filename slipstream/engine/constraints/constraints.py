"""Builds the constraints on the text of outputs, in threads beside the step loop. No torch here.

A request that needs a constraint waits here until it is built, and is then scheduled with it. If it
cannot be built, the request fails before anything of it runs. Words, short grammars and long
grammars have threads of their own, so that a long grammar delays none of the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import NamedTuple

from slipstream.engine.constraints.bad_words import BadTexts, Spelling
from slipstream.engine.constraints.guided import FIELD, GuideError, Guides
from slipstream.engine.constraints.stop_words import StopTexts
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.request import Constraint, GenerateRequest
from slipstream.engine.sampling_params import SamplingParams

NO_VOCABULARY = (
    "this engine knows no texts of its tokens: its tokenizer is missing, or of a kind that cannot "
    "be guided"
)


# Characters from which a grammar is long. Most short ones take milliseconds.
LONG_GUIDE = 8192
# Seconds after which a request whose grammar is still being compiled fails.
MAX_COMPILE_SECONDS = 15.0
_TOO_SLOW = f"{FIELD}takes over {MAX_COMPILE_SECONDS:g} s to compile: make it smaller"
_THREADS = {"words": 1, "short-guides": 1, "long-guides": 2}


@dataclass(slots=True)
class _Job:
    """A constraint that is being built."""

    request: GenerateRequest
    future: Future[Constraint] | None = None  # set when it is submitted
    started: float = math.inf  # time.monotonic() when a thread began

    @property
    def result(self) -> Future[Constraint]:
        assert self.future is not None
        return self.future

    def is_too_slow(self, now: float) -> bool:
        return now - self.started > MAX_COMPILE_SECONDS


class Built(NamedTuple):
    """A request whose constraint is built, or could not be."""

    request: GenerateRequest
    constraint: Constraint | None
    problem: str  # why there is no constraint


class Constraints:
    def __init__(self, read_vocabulary: Callable[[], Vocabulary | None] = lambda: None) -> None:
        self._read_vocabulary = read_vocabulary
        self._executors: dict[str, ThreadPoolExecutor] = {}  # created when first needed
        self._jobs: dict[int, _Job] = {}  # by request id, in order of arrival
        self._reading = threading.Lock()  # of the three below, which are created when first needed
        self._guides: Guides | None = None
        self._spelling: Spelling | None = None
        self._vocabulary: Vocabulary | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, request: GenerateRequest) -> None:
        """Start to build the constraint of a request."""
        kind = _kind(request.sampling)
        if kind not in self._executors:
            self._executors[kind] = ThreadPoolExecutor(_THREADS[kind], thread_name_prefix=kind)
        job = _Job(request)
        job.future = self._executors[kind].submit(self._run, job)
        self._jobs[request.request_id] = job

    def drop(self, request_id: int) -> bool:
        """Remove a request; return whether it was waiting here."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.result.cancel()  # has no effect if the thread has started
        return job is not None

    def take_expired(self, now: float) -> list[int]:
        """Remove and return the requests whose deadline has passed."""
        expired = [
            request_id
            for request_id, job in self._jobs.items()
            if (job.request.deadline or math.inf) <= now
        ]
        for request_id in expired:
            self.drop(request_id)
        return expired

    def take_ready(self) -> list[Built]:
        """Remove and return the requests whose constraints are done or take too long.

        They are in order of arrival.
        """
        now = time.monotonic()
        done = [job for job in self._jobs.values() if job.result.done() or job.is_too_slow(now)]
        for job in done:
            del self._jobs[job.request.request_id]
        return [_built(job) for job in done]

    def wait(self, seconds: float) -> None:
        """Wait until a constraint is done, or for this long."""
        if self._jobs:
            wait([job.result for job in self._jobs.values()], seconds, FIRST_COMPLETED)

    def _run(self, job: _Job) -> Constraint:
        """Build a constraint. Runs in a thread."""
        job.started = time.monotonic()
        sampling = job.request.sampling
        vocabulary = self._known_vocabulary()
        parts: list[Constraint] = []
        if sampling.guide is not None:
            with self._reading:
                self._guides = self._guides or Guides(vocabulary)
            parts.append(self._guides.open(sampling.guide, sampling.end_ids))
        if sampling.bad_texts:
            with self._reading:
                self._spelling = self._spelling or Spelling(vocabulary)
            parts.append(BadTexts(self._spelling, [text.encode() for text in sampling.bad_texts]))
        if sampling.stop_texts:
            parts.append(StopTexts(vocabulary, [text.encode() for text in sampling.stop_texts]))
        return parts[0] if len(parts) == 1 else All(parts)

    def _known_vocabulary(self) -> Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        if self._vocabulary is None:
            raise GuideError(NO_VOCABULARY)
        return self._vocabulary


def _kind(sampling: SamplingParams) -> str:
    """Return which threads build the constraint of a request."""
    if sampling.guide is None:
        return "words"
    return "long-guides" if len(sampling.guide.text) > LONG_GUIDE else "short-guides"


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


def _built(job: _Job) -> Built:
    request = job.request
    if not job.result.done():
        return Built(request, None, _TOO_SLOW)
    problem = job.result.exception()
    if problem is None:
        return Built(request, job.result.result(), "")
    if isinstance(problem, GuideError):
        return Built(request, None, str(problem))
    return Built(request, None, f"the constraint on the answer could not be made: {problem}")
