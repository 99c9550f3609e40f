"""A request as the engine sees it: tokens, sampling parameters and a deficit. No torch here.

A request has no phase. It knows tokens (the prompt, then what was sampled) and has computed some of
them; the difference is its deficit, and every step gives it up to its deficit of work. Prefill, chunked
context, reuse of cached blocks and resuming after preemption are all this one rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy.

    `temperature` 0 means greedy, whatever the rest says. `top_k` 0, `top_p` 1 and `min_p` 0 mean off.
    Repetition looks at the prompt and the output; presence and frequency at the output only.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits; the caller draws one when the user gave none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # end ids cannot win before this many tokens are out
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not appear
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    log_probs: bool = False  # the chosen token's log-probability
    top_log_probs: int = 0  # how many of the most likely tokens to report besides

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Nothing to do but take the likeliest token."""
        special = self.bad_words or self.logit_bias or self.min_tokens or self.log_probs or self.top_log_probs
        return self.greedy and not self.penalised and not special

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a client submits. `request_id` is the caller's own number, unique among the live ones."""

    request_id: int
    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher goes first; equal ones in order of arrival
    deadline: float | None = None  # on time.monotonic()'s clock, which the processes of a machine share
    adapter: int = 0  # 0: none
    cache_salt: str = ""  # tenants with different salts never share cached blocks


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. `0 <= computed <= known`; it finishes exactly once, with one reason.

        |--------- prompt ---------|---- sampled ----|- pending -|
        0                                       len(tokens)    known
        |------------- computed -------------|----- deficit -----|
    """

    request: GenerateRequest
    arrival: int  # order of submission; kept through preemption
    tokens: list[int]  # what the host knows: the prompt and the sampled tokens that came back
    pending: int = 0  # sampled by launched plans whose results are not applied yet
    computed: int = 0  # positions that launched plans compute
    settled: int = 0  # positions that applied plans have computed: their keys and values are written
    row: int = -1
    generation: int = -1
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # chain of full blocks' names, as far as it was needed
    named: int = 0  # how many of its blocks were offered to the pool under their names
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    sampling: SamplingParams = field(init=False)
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)  # how many tokens it may come to know

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.prompt_tokens = len(self.request.prompt)
        self.limit = self.prompt_tokens + self.sampling.max_tokens

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def deficit(self) -> int:
        """What is left to compute. The last allowed token needs no computing: nothing follows it."""
        known = len(self.tokens) + self.pending
        return known - self.computed if known < self.limit else 0

    def finish(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, f"request {self.request.request_id} finished twice"
        self.finish_reason = reason
