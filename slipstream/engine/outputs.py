"""Collects the outputs of requests until the server takes them. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.engine.messages import Scores, StepOutputs
from slipstream.engine.request import Request

TopLogProbs = list[tuple[int, float]]


class OutputBuffer:
    def __init__(self) -> None:
        self.outputs = StepOutputs()

    def __bool__(self) -> bool:
        return bool(self.outputs.request_ids)

    def take(self) -> StepOutputs | None:
        """Return the outputs since the last call, or None."""
        if not self.outputs.request_ids:
            return None
        taken = self.outputs
        self.outputs = StepOutputs()
        return taken

    def emit(
        self,
        request_id: int,
        tokens: Sequence[int] = (),
        reason: str = "",
        cached_tokens: int = 0,
        log_probs: Sequence[float] | None = None,
        top_log_probs: Sequence[TopLogProbs] = (),
        error: str = "",
    ) -> None:
        outputs = self.outputs
        outputs.request_ids.append(request_id)
        outputs.token_counts.append(len(tokens))
        outputs.finish_reasons.append(reason)
        outputs.cached_tokens.append(cached_tokens)
        outputs.tokens.extend(tokens)
        outputs.log_probs.extend([math.nan] * len(tokens) if log_probs is None else log_probs)
        if top_log_probs:
            outputs.top_log_probs.setdefault(request_id, []).extend(top_log_probs)
        if error:
            outputs.errors[request_id] = error

    def emit_token(
        self, request: Request, token: int, reason: str, log_prob: float, top: TopLogProbs | None
    ) -> None:
        """Do what `emit` does for a single token, the most frequent output."""
        outputs = self.outputs
        request_id = request.submitted.request_id
        outputs.request_ids.append(request_id)
        outputs.token_counts.append(1)
        outputs.finish_reasons.append(reason)
        outputs.cached_tokens.append(request.cached_tokens)
        outputs.tokens.append(token)
        outputs.log_probs.append(log_prob)
        if top is not None:
            outputs.top_log_probs.setdefault(request_id, []).append(top)

    def emit_unsent(self, request: Request, end: int, reason: str, error: str = "") -> int:
        """Emit the output tokens before `end` that were not sent, of a request whose output is
        revised; return how many.
        """
        tokens = request.take_unsent(end)
        log_probs = None
        tops: list[TopLogProbs] = []
        if request.decided is not None:
            scores = request.decided.scores[: len(tokens)]
            del request.decided.scores[: len(tokens)]
            log_probs = [score.log_prob for score in scores]
            tops = [score.top for score in scores if score.top is not None]
            for score in scores:
                if score.logits:
                    self.scores(request).generation_logits += score.logits
        request_id = request.submitted.request_id
        self.emit(request_id, tokens, reason, request.cached_tokens, log_probs, tops, error)
        return len(tokens)

    def scores(self, request: Request) -> Scores:
        return self.outputs.scores.setdefault(request.submitted.request_id, Scores())

    def emit_prompt_scores(
        self, request: Request, position: int, scores: Scores, vocab_size: int
    ) -> None:
        """Emit a step's scores of prompt positions from `position` on.

        Scores that were sent before a preemption or by another beam are left out: each beam of a
        group computes the end of the prompt.
        """
        owner = request.group.leader if request.group is not None else request
        if owner.scored >= owner.prompt_tokens:
            return
        already_sent = max(0, owner.scored - position)
        collected = self.scores(owner)
        collected.context_logits += scores.context_logits[already_sent * 4 * vocab_size :]
        collected.prompt_log_probs += scores.prompt_log_probs[already_sent:]
        collected.top_prompt_log_probs += scores.top_prompt_log_probs[already_sent:]
        collected.prompt_ranks += scores.prompt_ranks[already_sent:]
        collected.pooled = scores.pooled
        owner.scored = max(owner.scored, min(request.committed, owner.prompt_tokens))
        # Otherwise they are sent with the first token.
        if owner.scored < owner.prompt_tokens or owner.group is not None:
            self.emit(owner.submitted.request_id, cached_tokens=owner.cached_tokens)
