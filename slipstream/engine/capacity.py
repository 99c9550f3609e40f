"""The limits of an engine, and why a request exceeds them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import POOLING_KINDS

_USUAL_BEAMS = 64  # the widest beam search of an engine whose settings say nothing


def beam_limit(wanted: int | None, rows: int) -> int:
    """Return the most beams of a request. None: the engine decides."""
    return min(wanted or _USUAL_BEAMS, rows)


@dataclass(frozen=True)
class Capacity:
    rows: int
    sequence_tokens: int  # prompt and output of one request
    vocab_size: int
    beam_width: int  # of one request

    def problem(self, request: GenerateRequest) -> str:
        """Return why the request can never run; empty when it can."""
        prompt = len(request.prompt)
        max_tokens = request.sampling.max_tokens
        if prompt == 0:
            return "the prompt has no tokens"
        if max_tokens < 1:
            return f"max_tokens must be at least 1, not {max_tokens}"
        if prompt + max_tokens > self.sequence_tokens:
            return (
                f"prompt ({prompt} tokens) and max_tokens ({max_tokens}) exceed the longest "
                f"sequence, {self.sequence_tokens} tokens"
            )
        if request.sampling.pooling and request.sampling.pooling not in POOLING_KINDS:
            return f"pooling must be one of {', '.join(POOLING_KINDS)}"
        table_rows = request.prompt_table.rows if request.prompt_table is not None else 0
        sizes = ((request.prompt, self.vocab_size + table_rows), (request.draft, self.vocab_size))
        for tokens, size in sizes:
            outside = next((token for token in tokens if not 0 <= token < size), None)
            if outside is not None:
                return f"token id {outside} is outside the vocabulary of {self.vocab_size}"
        return self._beam_problem(request)

    def _beam_problem(self, request: GenerateRequest) -> str:
        width = request.sampling.beam_width
        if width < 1:
            return f"beam width must be at least 1, not {width}"
        if width > self.beam_width:
            return (
                f"Requested beam width {width} is larger than configured max beam width "
                f"{self.beam_width}"
            )
        if request.sampling.beams and request.sampling.guide is not None:
            return f"beam width {width} cannot be combined with a guide"
        if request.sampling.beams and request.sampling.candidates > self.vocab_size:
            return (
                f"beam width {width} needs more continuations than the vocabulary of "
                f"{self.vocab_size} has"
            )
        return ""
