"""What there is to tell the clients since they were last told, in the columns that cross the link.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.engine.messages import Scores, StepOutputs
from slipstream.engine.request import Request

TopLogProbs = list[tuple[int, float]]


class News:
    def __init__(self) -> None:
        self.outputs = StepOutputs()

    def __bool__(self) -> bool:
        return bool(self.outputs.request_ids)

    def take(self) -> StepOutputs | None:
        if not self.outputs.request_ids:
            return None
        taken, self.outputs = self.outputs, StepOutputs()
        return taken

    def tell(
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

    def tell_token(
        self, request: Request, token: int, reason: str, log_prob: float, top: TopLogProbs | None
    ) -> None:
        """`tell` of one token, which is what most news are."""
        outputs, request_id = self.outputs, request.request.request_id
        outputs.request_ids.append(request_id)
        outputs.token_counts.append(1)
        outputs.finish_reasons.append(reason)
        outputs.cached_tokens.append(request.cached_tokens)
        outputs.tokens.append(token)
        outputs.log_probs.append(log_prob)
        if top is not None:
            outputs.top_log_probs.setdefault(request_id, []).append(top)

    def scores(self, request: Request) -> Scores:
        return self.outputs.scores.setdefault(request.request.request_id, Scores())

    def tell_prompt_scores(
        self, request: Request, position: int, scores: Scores, vocab_size: int
    ) -> None:
        """A step's scores of prompt positions from `position` on, without those told before a
        preemption or by another beam: the beams of a group each compute the end of their prompt.
        """
        owner = request.group.leader if request.group is not None else request
        if owner.scored >= owner.prompt_tokens:
            return
        told = max(0, owner.scored - position)
        news = self.scores(owner)
        news.context_logits += scores.context_logits[told * 4 * vocab_size :]
        news.prompt_log_probs += scores.prompt_log_probs[told:]
        owner.scored = max(owner.scored, min(request.settled, owner.prompt_tokens))
        # otherwise they go with the first token
        if owner.scored < owner.prompt_tokens or owner.group is not None:
            self.tell(owner.request.request_id, cached_tokens=owner.cached_tokens)
