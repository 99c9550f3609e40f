"""Applies sampled tokens to requests. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from slipstream.engine.beams.group import BeamGroup
from slipstream.engine.constraints.revisions import Revised, Revisions, revise
from slipstream.engine.constraints.vocabulary import common_length
from slipstream.engine.outputs import OutputBuffer
from slipstream.engine.plan import StepResult
from slipstream.engine.request import (
    DecidedTokens,
    FinishReason,
    Request,
    Reviser,
    TokenScores,
)
from slipstream.engine.speculation import count_accepted
from slipstream.engine.statistics import Counters


class ResultHandler:
    def __init__(
        self,
        outputs: OutputBuffer,
        counters: Counters,
        finish: Callable[..., None],
        drop: Callable[[Request], None],
        revisions: Revisions | None = None,
    ) -> None:
        """finish: ends a request and sends its end; drop: releases what a finished request holds

        revisions: revises outputs in threads; None: at once.
        """
        self._outputs = outputs
        self._counters = counters
        self._finish = finish
        self._drop = drop
        self._revisions = revisions
        self.now = 0.0  # when the result being applied arrived

    def apply_token(self, request: Request, result: StepResult, index: int) -> None:
        """Do what `apply_tokens` does for requests without special needs: the hot path."""
        token = result.tokens[index]
        request.pending -= 1
        request.tokens.append(token)
        request.stats.record_token(self.now)
        self._counters.output_tokens += 1
        if token in request.sampling.end_ids:
            self._apply_end_token(request, result, index)
            return
        last = len(request.tokens) == request.limit
        log_prob = math.nan if result.log_probs is None else result.log_probs[index]
        self._outputs.emit_token(
            request, token, "length" if last else "", log_prob, result.top_log_probs.get(index)
        )
        if last:
            request.finish("length")
            self._drop(request)

    def _apply_end_token(self, request: Request, result: StepResult, index: int) -> None:
        if not request.sampling.include_end:
            self._finish(request, "stop")
            return
        self._emit(request, result, index, [result.tokens[index]], "stop")
        request.finish("stop")
        self._drop(request)

    def apply_tokens(self, request: Request, result: StepResult, index: int, drafts: int) -> None:
        """Apply the tokens that a request sampled after its last known token and after each of its
        `drafts` draft tokens. `index`: the first of them in the result.
        """
        if index in result.errors:
            unable = request.constraint.error if request.constraint is not None else ""
            self._finish(request, "error", unable or result.errors[index])
            return
        if request.sampling.pooling:  # the sampled token only marks the end of the prompt
            request.pending -= 1
            request.stats.record_token(self.now)
            self._finish(request, "stop")
            return
        if self._revisions is not None and self._may_wait(request, result.tokens[index]):
            self._revisions.start(request, result.tokens[index])
            return
        sampled = _before_first_error(result, index, 1 + drafts)
        count = count_accepted(sampled, request.draft_tokens)
        request.pending -= 1 + drafts
        request.stats.record_token(self.now)
        if request.reviser is not None:
            self._apply_revised(request, request.reviser, result, index, sampled)
            return
        tokens, reason = _append_tokens(request, sampled[:count])
        self._counters.output_tokens += len(tokens) + (reason == "stop" and len(tokens) < count)
        if drafts:
            _commit_draft_tokens(request, drafts, count - 1)
            self._counters.draft_tokens += drafts
            self._counters.accepted_draft_tokens += count - 1
        self._emit(request, result, index, tokens, reason)
        if reason:
            request.finish(reason)
            self._drop(request)

    def _may_wait(self, request: Request, token: int) -> bool:
        """Return whether a token of a revised output may be applied in a later step."""
        if request.reviser is None or request.decided is not None:
            return False
        return token not in request.sampling.end_ids

    def apply_revised(self, request: Request, token: int, revised: Revised) -> None:
        """Apply a token with what a thread has made of the output that ends with it."""
        request.pending -= 1
        request.stats.record_token(self.now)
        request.tokens.append(token)
        change = _change(request, revised)
        if change.tokens is not None:
            request.replace_output(change.first, change.tokens)
        self._send_settled(request, change.reason, change.settled)

    def _apply_revised(
        self, request: Request, reviser: Reviser, result: StepResult, index: int, sampled: list[int]
    ) -> None:
        """Apply the tokens of a request whose output is revised, and send those that stay."""
        if request.decided is None:
            reason, settled = self._append_revised(request, reviser, sampled[0])
        else:
            reason = self._append_scored(request, reviser, request.decided, result, index, sampled)
            settled = request.decided.settled
        self._send_settled(request, reason, settled)

    def _send_settled(self, request: Request, reason: FinishReason | None, settled: int) -> None:
        """Send the first `settled` tokens of an output, or all of it with its finish reason."""
        output = len(request.tokens) - request.prompt_tokens
        if reason:
            request.finish(reason)
        end = output if reason else min(settled, output)
        # scores of the prompt may wait
        if end > request.sent or reason or request.sampling.scores_prompt:
            self._counters.output_tokens += self._outputs.emit_unsent(request, end, reason or "")
        if reason:
            self._drop(request)

    def _append_revised(
        self, request: Request, reviser: Reviser, token: int
    ) -> tuple[FinishReason | None, int]:
        """Append a token and revise the output; return the finish reason and the settled tokens."""
        if token in request.sampling.end_ids:
            self._append_end_token(request, token)
            return "stop", 0
        request.tokens.append(token)
        revised = _revise(request, reviser)
        if revised.tokens is not None:
            request.replace_output(revised.first, revised.tokens)
        return revised.reason, revised.settled

    def _append_end_token(self, request: Request, token: int) -> None:
        """Append the end token of a revised output, if it is part of it; count it otherwise."""
        if request.sampling.include_end:
            request.tokens.append(token)
        else:
            self._counters.output_tokens += 1

    def _append_scored(
        self,
        request: Request,
        reviser: Reviser,
        decided: DecidedTokens,
        result: StepResult,
        index: int,
        sampled: list[int],
    ) -> FinishReason | None:
        """Append tokens whose scores are reported, and decide on those after them; return the
        finish reason. The sampled tokens begin with those decided on before.
        """
        drafts = len(request.draft_tokens)
        accepted = min(drafts, len(sampled))
        request.scheduled -= drafts - accepted
        request.committed += accepted
        known = min(len(sampled), len(decided.tokens))
        request.tokens += sampled[:known]
        decided.scores += [_token_scores(result, index + place) for place in range(known)]
        del decided.tokens[:known]
        if decided.tokens or decided.ending or known == len(sampled):
            return None if decided.tokens else decided.ending
        token = sampled[known]
        decided.scores.append(_token_scores(result, index + known))
        if token in request.sampling.end_ids:
            self._append_end_token(request, token)
            return "stop"
        request.tokens.append(token)
        revised = _revise(request, reviser)
        decided.settled = revised.settled
        if revised.tokens is None:
            return revised.reason
        del request.tokens[request.prompt_tokens + revised.first :]
        del decided.scores[revised.first - request.sent :]
        decided.tokens = list(revised.tokens)
        decided.ending = revised.reason
        # The last token that stays is computed again: its logits score the first of these tokens.
        request.scheduled = min(request.scheduled, len(request.tokens) - 1)
        request.committed = min(request.committed, request.scheduled)
        return None if decided.tokens else revised.reason

    def _emit(
        self,
        request: Request,
        result: StepResult,
        index: int,
        tokens: list[int],
        reason: FinishReason | None,
    ) -> None:
        places = range(index, index + len(tokens))
        for place in places:
            if place in result.generation_logits:
                self._outputs.scores(request).generation_logits += result.generation_logits[place]
        log_probs = None
        if result.log_probs is not None:
            log_probs = [result.log_probs[place] for place in places]
        tops = [result.top_log_probs[place] for place in places if place in result.top_log_probs]
        self._outputs.emit(
            request.submitted.request_id,
            tokens,
            reason or "",
            request.cached_tokens,
            log_probs,
            tops,
        )

    def apply_beam(self, member: Request, group: BeamGroup, result: StepResult, index: int) -> None:
        """Apply what one beam of a group sampled, and end the group if its search is over."""
        logits = result.generation_logits.get(index, b"")
        advanced = group.add_sample(member, result.top_log_probs.get(index, []), logits)
        if not advanced or not group.search.finished:
            return
        found = group.search.results()
        self._counters.output_tokens += sum(len(beam.tokens) for beam in found)
        if not found:
            error = result.errors.get(index, "no beam could be continued")
            self._finish(group.leader, "error", error)
        else:
            self._finish(group.leader, "stop" if found[0].finish_reason == "stop" else "length")


def _before_first_error(result: StepResult, index: int, count: int) -> list[int]:
    """Return the tokens from `index` on, up to `count`, that precede the first error."""
    end = index
    while end < index + count and end not in result.errors:
        end += 1
    return result.tokens[index:end]


def _append_tokens(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Append sampled tokens up to the request's end; return those of the output, and the finish
    reason.
    """
    taken: list[int] = []
    for token in tokens:
        request.tokens.append(token)
        if token in request.sampling.end_ids:
            return [*taken, token] if request.sampling.include_end else taken, "stop"
        taken.append(token)
        if request.constraint is not None and request.constraint.complete(
            request.tokens[request.prompt_tokens :]
        ):
            return taken, "stop"
        if len(request.tokens) == request.limit:
            return taken, "length"
    return taken, None


class _Change(NamedTuple):
    first: int  # output tokens that stay
    tokens: list[int] | None  # the tokens after them; None: the output stays as it is
    reason: FinishReason | None  # how the output then ends
    settled: int  # first output tokens that never change


def _revise(request: Request, reviser: Reviser) -> _Change:
    """Return what a reviser changes of a request's output."""
    output = request.tokens[request.prompt_tokens :]
    return _change(request, revise(request, reviser, output, request.sent))


def _change(request: Request, revised: Revised) -> _Change:
    """Return what a revision changes of a request's output."""
    sampling = request.sampling
    output = request.tokens[request.prompt_tokens :]
    found = revised.revision.tokens
    first = common_length(output, found)
    ends = (
        place
        for place in range(max(first, sampling.min_tokens), len(found))
        if found[place] in sampling.end_ids
    )
    end = next(ends, len(found))
    kept = found[: end + sampling.include_end]
    tokens = kept[first:] if first < max(len(output), len(kept)) else None
    reason: FinishReason | None = "length" if end == sampling.max_tokens else None
    if end < len(found) or revised.complete:
        reason = "stop"
    return _Change(first, tokens, reason, revised.revision.settled)


def _token_scores(result: StepResult, place: int) -> TokenScores:
    log_prob = math.nan if result.log_probs is None else result.log_probs[place]
    logits = result.generation_logits.get(place, b"")
    return TokenScores(log_prob, result.top_log_probs.get(place), logits)


def _commit_draft_tokens(request: Request, drafts: int, accepted: int) -> None:
    """Commit accepted draft tokens, and undo the scheduling of the rejected ones."""
    request.stats.draft_tokens += drafts
    request.stats.accepted_draft_tokens += accepted
    if request.proposer is not None:
        request.proposer.learn(drafts, accepted)
    request.scheduled -= drafts - accepted
    request.committed += accepted
