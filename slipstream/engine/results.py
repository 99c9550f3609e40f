"""What becomes of requests when a step has sampled for them. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable

from slipstream.engine.beams.beams import BeamGroup
from slipstream.engine.counters import Counters
from slipstream.engine.outputs import News
from slipstream.engine.plan import StepResult
from slipstream.engine.request import FinishReason, Request
from slipstream.engine.speculation import accepted


class Results:
    def __init__(
        self,
        news: News,
        counters: Counters,
        finish: Callable[..., None],
        drop: Callable[[Request], None],
    ) -> None:
        """finish: ends a request and tells its client; drop: gives back what an ended one holds"""
        self._news, self._counters, self._finish, self._drop = news, counters, finish, drop
        self.now = 0.0  # when the results being applied came

    def take_token(self, request: Request, result: StepResult, index: int) -> None:
        """What `take` comes to for most requests, without what only some need: thousands a second
        come here.
        """
        token = result.tokens[index]
        request.pending -= 1
        request.tokens.append(token)
        request.marks.arrive(self.now)
        self._counters.output_tokens += 1
        if token in request.sampling.end_ids:  # the end mark itself is not part of the answer
            self._finish(request, "stop")
            return
        last = len(request.tokens) == request.limit
        log_prob = math.nan if result.log_probs is None else result.log_probs[index]
        self._news.tell_token(
            request, token, "length" if last else "", log_prob, result.top_log_probs.get(index)
        )
        if last:
            request.finish("length")
            self._drop(request)

    def take(self, request: Request, result: StepResult, index: int, drafted: int) -> None:
        if index in result.errors:
            unable = request.constraint.error if request.constraint is not None else ""
            self._finish(request, "error", unable or result.errors[index])
            return
        drawn = result.tokens[index : index + 1 + drafted]
        drawn = drawn[
            : next((i for i in range(len(drawn)) if index + i in result.errors), len(drawn))
        ]
        count = accepted(drawn, request.guesses)
        request.pending -= 1 + drafted
        request.marks.arrive(self.now)
        tokens, reason = _take_tokens(request, drawn[:count])
        self._counters.output_tokens += len(tokens) + (reason == "stop" and len(tokens) < count)
        if drafted:
            _settle_guesses(request, drafted, count - 1)
            self._counters.draft_tokens += drafted
            self._counters.accepted_draft_tokens += count - 1
        span = range(index, index + len(tokens))
        for place in span:
            if place in result.generation_logits:
                self._news.scores(request).generation_logits += result.generation_logits[place]
        log_probs = (
            None if result.log_probs is None else [result.log_probs[place] for place in span]
        )
        tops = [result.top_log_probs[place] for place in span if place in result.top_log_probs]
        self._news.tell(
            request.request.request_id, tokens, reason or "", request.cached_tokens, log_probs, tops
        )
        if reason:
            request.finish(reason)
            self._drop(request)

    def take_beam(self, member: Request, group: BeamGroup, result: StepResult, index: int) -> None:
        logits = result.generation_logits.get(index, b"")
        if (
            not group.tell(member, result.top_log_probs.get(index, []), logits)
            or not group.search.finished
        ):
            return
        found = group.search.results()
        self._counters.output_tokens += sum(len(beam.tokens) for beam in found)
        if not found:
            self._finish(
                group.leader, "error", result.errors.get(index, "no beam could be continued")
            )
        else:
            self._finish(group.leader, "stop" if found[0].finish_reason == "stop" else "length")


def _take_tokens(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Append sampled tokens as far as the request goes → those of the answer, and why it ends with
    them.
    """
    taken: list[int] = []
    for token in tokens:
        request.tokens.append(token)
        if token in request.sampling.end_ids:  # the end mark itself is not part of the answer
            return taken, "stop"
        taken.append(token)
        if request.constraint is not None and request.constraint.complete(
            request.tokens[request.prompt_tokens :]
        ):
            return taken, "stop"
        if len(request.tokens) == request.limit:
            return taken, "length"
    return taken, None


def _settle_guesses(request: Request, drafted: int, right: int) -> None:
    """Guesses that were right are computed; the rest is as if it had never been."""
    request.marks.draft_tokens += drafted
    request.marks.accepted_draft_tokens += right
    if request.drafter is not None:
        request.drafter.learn(drafted, right)
    request.computed -= drafted - right
    request.settled += right
