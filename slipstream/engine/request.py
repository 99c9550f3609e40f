"""A request as the engine sees it: tokens, sampling parameters and a deficit. No torch here.

A request has no phase. It knows tokens (the prompt, then what was sampled) and has computed some of
them; the difference is its deficit, and every step gives it up to its deficit of work. Prefill,
chunked context, reuse of cached blocks and resuming after preemption are all this one rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from slipstream.engine.adapters.adapters import AdapterSource
from slipstream.engine.cache.retention import Keep, Retention

if TYPE_CHECKING:
    from slipstream.engine.beams.beams import BeamGroup
    from slipstream.engine.speculation import Drafter

COLDEST = 1e-6  # temperatures below are as good as 0, and logits divided by them beyond all numbers
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar that the whole answer obeys."""

    kind: str  # json, json_schema, regex, ebnf_grammar, structural_tag or choice
    text: str  # the schema, the expression, …; a JSON list of strings for choice


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy.

    `temperature` 0 means greedy, whatever the rest says. `top_k` 0, `top_p` 1 and `min_p` 0 mean
    off. Repetition looks at the prompt and the output; presence and frequency at the output only.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    # top_p shrinks by this with every token of the answer, but not under top_p_min,
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1  # and begins anew after this token; -1: never
    min_p: float = 0.0
    seed: int = 0  # 64 bits; the caller draws one when the user gave none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # end ids cannot win before this many tokens are out
    end_ids: tuple[int, ...] = ()
    # a run of this many tokens may not come twice, prompt included; 0: off
    no_repeat_ngram: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not appear
    # nor may these in the text of the answer, however it is cut into tokens
    bad_texts: tuple[str, ...] = ()
    # in the text of a beam, these end it; of other answers, the caller sees the text
    stop_texts: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    log_probs: bool = False  # the chosen token's log-probability
    top_log_probs: int = 0  # how many of the most likely tokens to report besides
    prompt_log_probs: bool = False  # the log-probability of every prompt token but the first
    context_logits: bool = False  # the model's logits at every position of the prompt
    # those that each token was chosen from, before any parameter changed them
    generation_logits: bool = False
    guide: Guide | None = None  # what the answer must look like
    beam_width: int = 1  # over 1: beam search, told of at its end
    length_penalty: float = 0.0  # a beam's score is its log-probability / its length to this power
    # 1: at `beam_width` ended beams; 0: when no better one is likely; else: when none can be
    early_stopping: int = 1
    diversity_rate: float = 0.0  # times a beam's place, added to its score when beams are chosen
    timing: bool = False  # tell, at the end, when it was where

    @property
    def beams(self) -> bool:
        return self.beam_width > 1

    @property
    def candidates(self) -> int:
        """How many continuations of each beam are looked at: enough when all of the best ones end."""
        return self.beam_width * max(2, 1 + len(self.end_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Nothing to do but take the likeliest token."""
        special = (
            self.bad_words
            or self.logit_bias
            or self.min_tokens
            or self.log_probs
            or self.top_log_probs
        )
        special = (
            special
            or self.no_repeat_ngram
            or self.generation_logits
            or self.constrained
            or self.beams
        )
        return self.greedy and not self.penalised and not special

    @property
    def narrows(self) -> bool:
        """A draw is made from some of the tokens only."""
        return self.top_k > 0 or self.top_p < 1.0 or self.top_p_decay < 1.0

    @property
    def constrained(self) -> bool:
        """Which tokens may come depends on the text so far: the next one waits until the last is
        known.
        """
        return self.guide is not None or bool(self.bad_texts or self.stop_texts)

    @property
    def scores_prompt(self) -> bool:
        """Every position of the prompt is computed for its logits, the cache or not."""
        return self.prompt_log_probs or self.context_logits

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Embeddings of tokens that the model does not have: row r is what token `first_token` + r
    stands for.
    """

    first_token: int  # the size of the model's vocabulary
    rows: int
    values: bytes  # float32 [rows, hidden]

    @property
    def digest(self) -> str:
        """Tells tables apart by content: what is computed with one is never reused with another."""
        return hashlib.sha256(self.values).hexdigest()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a client submits. `request_id` is the caller's own number, unique among the live ones."""

    request_id: int
    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher goes first; equal ones in order of arrival
    # on time.monotonic()'s clock, which the processes of a machine share
    deadline: float | None = None
    adapter: int = 0  # 0: none
    cache_salt: str = ""  # tenants with different salts never share cached blocks
    draft: list[int] = field(default_factory=list)  # a guess at how the answer begins
    # the live request of the same prompt whose blocks it shares from the start
    prompt_of: int | None = None
    adapter_name: str = ""  # what errors call the adapter
    adapter_source: AdapterSource | None = None  # where to load it from, unless the engine has it
    prompt_table: PromptTable | None = None  # for prompts with tokens beyond the vocabulary
    retention: Retention | None = None  # how dear the blocks are that it leaves behind


class Constraint(Protocol):
    """Which tokens may come next, by the text so far. Made beside the step loop, asked in it."""

    @property
    def error(self) -> str:
        """Why no token is allowed any more; empty while some are."""
        ...

    def mask(self, tokens: list[int]) -> bytes:
        """The answer's tokens so far → a bit for each token of the vocabulary, lowest first, in
        32-bit words.

        Empty where all may come.
        """
        ...

    def complete(self, tokens: list[int]) -> bool:
        """Nothing can follow these tokens: the answer is whole."""
        ...


@dataclass(slots=True)
class Marks:
    """When a request was where, in seconds on the scheduler's clock; 0: not yet."""

    arrived: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    allocated_blocks: int = 0
    prompt_blocks: int = 0  # of those, before the first token came
    reused_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def arrive(self, now: float) -> None:
        """A token has come."""
        if not self.first_token:
            self.first_token, self.prompt_blocks = now, self.allocated_blocks
        self.last_token = now


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. `0 <= computed <= known`; it finishes exactly once, with one
    reason.

        |--------- prompt ---------|---- sampled ----|- pending -|
        0                                       len(tokens)    known
        |------------- computed -------------|----- deficit -----|
    """

    request: GenerateRequest
    arrival: int  # order of submission; kept through preemption
    tokens: list[int]  # what the host knows: the prompt and the sampled tokens that came back
    pending: int = 0  # sampled by launched plans whose results are not applied yet
    computed: int = 0  # positions that launched plans compute
    # positions that applied plans have computed: their keys and values are written
    settled: int = 0
    row: int = -1
    generation: int = -1
    blocks: list[int] = field(default_factory=list)
    # chain of full blocks' names, as far as it was needed
    names: list[bytes] = field(default_factory=list)
    named: int = 0  # how many of its blocks were offered to the pool under their names
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    # blocks it may still come to need, while it runs; with a window, those it holds too
    claim: int = 0
    # how far its blocks were let go of, because nothing that it computes looks at them
    passed: int = 0
    lockstep: bool = False  # nothing of it is computed while a token of it is on its way
    group: BeamGroup | None = None  # of which it is one beam
    drafter: Drafter | None = None
    guesses: Sequence[int] = ()  # those being computed
    source: Request | None = None  # of the same prompt, and there first
    # that wait for its prompt to be computed
    followers: list[Request] = field(default_factory=list)
    constraint: Constraint | None = None
    scored: int = 0  # positions of the prompt whose scores were told; of beams, the leader's counts
    marks: Marks = field(default_factory=Marks)

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
        if self.lockstep and self.pending:
            return 0
        known = len(self.tokens) + self.pending
        return known - self.computed if known < self.limit else 0

    def keep_of(self, block: int, block_tokens: int) -> Keep | None:
        """How dear its block of this number is to it."""
        retention = self.request.retention
        return (
            None
            if retention is None
            else retention.of_block(block * block_tokens, self.prompt_tokens)
        )

    def finish(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, f"request {self.request.request_id} finished twice"
        self.finish_reason = reason
