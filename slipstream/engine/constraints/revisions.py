"""Revises the outputs of constrained requests, in threads or at once. No torch here.

The masks of guided requests take long beside a step of a GPU. In threads, the requests without a
constraint do not wait for them: to the scheduler, a sampled token that is being revised has not
arrived yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from slipstream.engine.request import Request, Reviser, Revision


class Revised(NamedTuple):
    """An output and its next token, as the reviser changed them."""

    revision: Revision  # cut to the most tokens of the output
    complete: bool  # nothing can follow


class _Job(NamedTuple):
    request: Request
    epoch: int  # of the request; another one has started again
    token: int
    batch: int  # jobs that were started between two plans have the same number
    future: Future[Revised]


def revise(request: Request, reviser: Reviser, output: list[int], fixed: int) -> Revised:
    """Revise an output."""
    revision = reviser.revise(output, fixed)
    tokens = revision.tokens[: request.sampling.max_tokens]
    complete = request.constraint is not None and request.constraint.complete(tokens)
    return Revised(Revision(tokens, revision.settled), complete)


def revise_ahead(request: Request, reviser: Reviser, output: list[int], fixed: int) -> Revised:
    """Revise an output, and have the constraint compute the mask that the next plan asks for."""
    revised = revise(request, reviser, output, fixed)
    if not revised.complete and request.constraint is not None:
        request.constraint.mask(revised.revision.tokens)
    return revised


class Revisions:
    """The revisions that threads compute."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="revisions")
        self._jobs: dict[int, _Job] = {}  # by request id
        self._batch = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, request: Request, token: int) -> None:
        """Start to revise a request's output with the token that was sampled after it."""
        assert request.reviser is not None
        output = [*request.tokens[request.prompt_tokens :], token]
        future = self._executor.submit(revise_ahead, request, request.reviser, output, request.sent)
        request_id = request.submitted.request_id
        self._jobs[request_id] = _Job(request, request.epoch, token, self._batch, future)

    def take_ready(self) -> Iterator[tuple[Request, int, Revised]]:
        """Remove and yield the completed revisions: the request, its token and its revised output.

        Requests whose tokens arrived together continue together: a step with masks costs more
        than one without.
        """
        self._batch += 1
        late = {job.batch for job in self._jobs.values() if not job.future.done()}
        for request_id, job in list(self._jobs.items()):
            if job.batch not in late:
                del self._jobs[request_id]
                if job.request.row >= 0 and job.request.epoch == job.epoch:
                    yield job.request, job.token, job.future.result()

    def forget(self, request: Request) -> Future[Revised] | None:
        """Remove the revision of a request that leaves its row, and return what still computes."""
        job = self._jobs.pop(request.submitted.request_id, None)
        return None if job is None else job.future

    def stop(self, request: Request) -> None:
        """Remove the revision of a request that will run again, once its constraint is free."""
        future = self.forget(request)
        if future is not None:
            wait([future])

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all revisions are done, or for this long."""
        wait([job.future for job in self._jobs.values()], seconds)
