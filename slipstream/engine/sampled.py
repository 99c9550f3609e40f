"""What becomes of a request when tokens were sampled for it. No torch here."""

from __future__ import annotations

from slipstream.engine.request import FinishReason, Request


def take_tokens(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Append sampled tokens as far as the request goes → those of the answer, and why it ends with them."""
    taken: list[int] = []
    for token in tokens:
        request.tokens.append(token)
        if token in request.sampling.end_ids:  # the end mark itself is not part of the answer
            return taken, "stop"
        taken.append(token)
        if request.constraint is not None and request.constraint.complete(request.tokens[request.prompt_tokens :]):
            return taken, "stop"
        if len(request.tokens) == request.limit:
            return taken, "length"
    return taken, None


def settle_guesses(request: Request, drafted: int, right: int) -> None:
    """Guesses that were right are computed; the rest is as if it had never been."""
    request.marks.draft_tokens += drafted
    request.marks.accepted_draft_tokens += right
    if request.drafter is not None:
        request.drafter.learn(drafted, right)
    request.computed -= drafted - right
    request.settled += right
