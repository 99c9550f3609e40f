"""A request inside the engine: its tokens, its sampling parameters and its deficit. No torch here.

A request has no phase. It knows tokens (the prompt, then the sampled tokens), and some of them are
scheduled. The rest is its deficit, and every step schedules up to this many tokens of it. Prefill,
chunked prefill, reuse of cached blocks and resuming after preemption all follow from this rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.cache.retention import Retention, RetentionPriority

if TYPE_CHECKING:
    from slipstream.engine.beams.group import BeamGroup
    from slipstream.engine.speculation import DraftProposer

# Lower temperatures count as 0: logits divided by them could overflow.
MIN_TEMPERATURE = 1e-6
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar that the whole output must match."""

    kind: str  # json, json_schema, regex, ebnf_grammar, structural_tag or choice
    text: str  # the schema, the expression, …; a JSON list of strings for choice


@dataclass(frozen=True, slots=True)
class BaseSamplingParams:
    """The sampling parameters that requests and `slipstream.LLM` share. The defaults are greedy.

    `temperature` 0 means greedy, whatever the other fields say. `top_k` 0, `top_p` 1 and `min_p` 0
    mean off. The repetition penalty applies to tokens of the prompt and the output, the presence
    and frequency penalties to tokens of the output only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 1.0  # factor on top_p after each output token
    top_p_min: float = 1e-6  # lower bound of the decayed top_p
    top_p_reset_id: int = -1  # token that resets the decay; -1: none
    min_p: float = 0.0
    typical_p: float = 1.0  # probability of the locally typical tokens to sample from; 1: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # end ids are excluded before this many output tokens
    # length of token sequences that may not occur twice, prompt included; 0: off
    no_repeat_ngram: int = 0
    log_probs: bool = False  # report the log-probability of each sampled token
    top_log_probs: int = 0  # number of likeliest tokens to report for each sampled token
    prompt_log_probs: bool = False  # report the log-probability of every prompt token but the first
    context_logits: bool = False  # report the logits at every position of the prompt
    # report the logits that each token was sampled from, before any parameter changed them
    generation_logits: bool = False
    beam_width: int = 1  # over 1: beam search, whose beams are sent when the request ends
    length_penalty: float = 0.0  # a beam's score is its log-probability / length ** length_penalty
    diversity_rate: float = 0.0  # times a beam's index, added to its score when beams are selected


@dataclass(frozen=True, slots=True)
class SamplingParams(BaseSamplingParams):
    """The sampling parameters of a request."""

    max_tokens: int = 16
    seed: int = 0  # 64 bits; the caller draws one when the user gave none
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not occur
    # texts that the output may not contain, however they are tokenised
    bad_texts: tuple[str, ...] = ()
    # texts that end a beam; for other requests the caller looks for stop words in the text
    stop_texts: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit)
    guide: Guide | None = None
    # when a beam search ends. 1: at `beam_width` finished beams; 0: when a better one is unlikely;
    # otherwise: when none can be better
    early_stopping: int = 1
    timing: bool = False  # report timestamps when the request ends

    @property
    def beams(self) -> bool:
        """Whether the request is a beam search."""
        return self.beam_width > 1

    @property
    def candidates(self) -> int:
        """The number of continuations considered per beam: enough even if the best ones all end."""
        return self.beam_width * max(2, 1 + len(self.end_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Whether sampling is an argmax of the model's own logits, and only tokens are reported."""
        changes_logits = (
            self.penalised
            or self.bad_words
            or self.logit_bias
            or self.min_tokens
            or self.no_repeat_ngram
            or self.constrained
        )
        reports_more = self.log_probs or self.top_log_probs or self.generation_logits
        return self.greedy and not self.beams and not changes_logits and not reports_more

    @property
    def narrows(self) -> bool:
        """Whether top-k or top-p restricts the tokens that a draw considers."""
        return self.top_k > 0 or self.top_p < 1.0 or self.top_p_decay < 1.0

    @property
    def constrained(self) -> bool:
        """Whether the allowed tokens depend on the text so far, so that the host must know a token
        before the next one is sampled.
        """
        return self.guide is not None or bool(self.bad_texts or self.stop_texts)

    @property
    def scores_prompt(self) -> bool:
        """Whether logits are needed at every position of the prompt, cached or not."""
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
    """Embeddings of tokens beyond the model's vocabulary (prompt tuning).

    Row r is the embedding of token `first_token` + r.
    """

    first_token: int  # the size of the model's vocabulary
    rows: int
    values: bytes  # float32 [rows, hidden]

    @property
    def digest(self) -> str:
        """A hash of the content. Blocks computed with one table are never reused with another."""
        return hashlib.sha256(self.values).hexdigest()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request as a client submits it. `request_id` is unique among the client's live requests."""

    request_id: int
    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher is scheduled first; equal ones in order of arrival
    # on time.monotonic()'s clock, which the processes of a machine share
    deadline: float | None = None
    adapter: int = 0  # 0: none
    cache_salt: str = ""  # tenants with different salts never share cached blocks
    draft: list[int] = field(default_factory=list)  # draft tokens of the output's beginning
    # id of a live request with the same prompt, whose blocks this one shares
    shares_prompt_with: int | None = None
    adapter_name: str = ""  # the adapter's name in error messages
    adapter_source: AdapterSource | None = (
        None  # where to load the adapter from; None: loaded before
    )
    prompt_table: PromptTable | None = None  # embeddings of prompt tokens beyond the vocabulary
    retention: Retention | None = None  # retention priorities of the blocks it leaves in the cache


class Constraint(Protocol):
    """The tokens that are allowed next, given the output so far.

    Constraints are built in a thread beside the step loop, and used in the loop.
    """

    @property
    def error(self) -> str:
        """Why no token is allowed any more; empty while some are."""
        ...

    def mask(self, tokens: list[int]) -> bytes:
        """Return the allowed tokens after these output tokens: one bit per token of the vocabulary,
        lowest first, in 32-bit words. Empty: all tokens are allowed.
        """
        ...

    def complete(self, tokens: list[int]) -> bool:
        """Return whether the output is complete after these tokens: no token may follow."""
        ...


@dataclass(slots=True)
class RequestStats:
    """Timestamps and counts of one request, in seconds on the scheduler's clock; 0: not yet."""

    arrived: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    allocated_blocks: int = 0
    prompt_blocks: int = 0  # blocks allocated before the first token
    reused_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def record_token(self, now: float) -> None:
        if not self.first_token:
            self.first_token = now
            self.prompt_blocks = self.allocated_blocks
        self.last_token = now


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. It finishes exactly once, with one reason.

        |------------- prompt -------------|-------- sampled --------|-- pending --|
        0                            prompt_tokens              len(tokens)      known     limit
        |------ committed ------|---- scheduled, in flight ----|----- deficit -----|
        0                   committed                      scheduled             known

    `0 <= committed <= scheduled <= known <= limit`. Counted in blocks:

        |-- released_blocks --|------------ held -------------|------ reserved_blocks ------|
        |----------- hashed_blocks -----------|
        0                                               len(blocks)                    max_blocks

    `released_blocks` is 0 without a sliding window. With one, sink blocks stay held, and
    `reserved_blocks` counts held blocks, too.
    """

    request: GenerateRequest
    arrival: int  # order of submission; kept through preemption
    tokens: list[int]  # tokens that the host knows: the prompt and the committed samples
    pending: int = 0  # tokens sampled by launched plans whose results have not arrived
    scheduled: int = 0  # positions that launched plans compute
    committed: int = 0  # positions whose keys and values are known to be written
    row: int = -1  # -1: waiting
    epoch: int = -1  # number of the row's use; -1: never ran
    blocks: list[int] = field(default_factory=list)  # block table
    # hashes of full blocks, computed as far as needed
    block_hashes: list[bytes] = field(default_factory=list)
    hashed_blocks: int = 0  # blocks registered in the pool under their hashes
    cached_tokens: int = 0  # prompt tokens found in the cache
    finish_reason: FinishReason | None = None
    reserved_blocks: int = 0  # blocks the running request may still need
    released_blocks: int = 0  # end of the blocks released because the window has moved past them
    # no token is scheduled while a sampled one has not arrived
    needs_host_result: bool = False
    group: BeamGroup | None = None  # the beam search it is a beam of
    proposer: DraftProposer | None = None
    draft_tokens: Sequence[int] = ()  # draft tokens that are being computed
    prompt_source: Request | None = None  # an earlier request with the same prompt
    # requests with the same prompt that wait until this one has computed it
    dependents: list[Request] = field(default_factory=list)
    constraint: Constraint | None = None
    scored: int = 0  # prompt positions whose scores were sent; of beams, the leader's counts
    stats: RequestStats = field(default_factory=RequestStats)

    sampling: SamplingParams = field(init=False)
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)  # maximum number of tokens, prompt included

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.prompt_tokens = len(self.request.prompt)
        self.limit = self.prompt_tokens + self.sampling.max_tokens

    @property
    def known(self) -> int:
        """The number of tokens: those the host knows and those being sampled."""
        return len(self.tokens) + self.pending

    @property
    def deficit(self) -> int:
        """The number of tokens left to schedule. The last allowed token is never computed, because
        no token follows it.
        """
        if self.needs_host_result and self.pending:
            return 0
        known = len(self.tokens) + self.pending
        return known - self.scheduled if known < self.limit else 0

    def retention_priority(self, block: int, block_tokens: int) -> RetentionPriority | None:
        """Return the retention priority of a block, by its index in the table."""
        retention = self.request.retention
        if retention is None:
            return None
        return retention.find_priority(block * block_tokens, self.prompt_tokens)

    def finish(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, f"request {self.request.request_id} finished twice"
        self.finish_reason = reason
