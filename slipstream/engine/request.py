"""A request inside the engine: its tokens and its deficit. No torch here.

A request has no phase. It knows tokens (the prompt, then the sampled tokens), and some of them are
scheduled. The rest is its deficit, and every step schedules it as far as the token budget allows.
Prefill, chunked prefill, reuse of cached blocks and resuming after preemption all follow from this
rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.cache.eviction import Retention, RetentionPriority
from slipstream.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.beams.group import BeamGroup
    from slipstream.engine.speculation import AdaptiveLookup, DraftProposer

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


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
        """Return why no token is allowed any more; empty while some are."""
        ...

    def mask(self, tokens: list[int]) -> bytes:
        """Return the allowed tokens after these output tokens: one bit per token of the vocabulary,
        lowest first, in 32-bit words. Empty: all tokens are allowed.
        """
        ...

    def complete(self, tokens: list[int]) -> bool:
        """Return whether the output is complete after these tokens: no token may follow."""
        ...


class Revision(NamedTuple):
    """An output as a constraint has revised it."""

    tokens: list[int]
    settled: int  # number of first tokens that no later revision changes


@runtime_checkable
class Reviser(Protocol):
    """A constraint that may change the last output tokens, and append tokens."""

    def revise(self, tokens: list[int], fixed: int) -> Revision:
        """Return the output that continues these tokens without a choice: the same text, perhaps in
        other tokens after the first `fixed` ones, and then what must follow.
        """
        ...

    def only(self, token: int) -> bytes:
        """Return the mask that allows a single token."""
        ...


class TokenScores(NamedTuple):
    """The scores of one output token, as far as they are reported."""

    log_prob: float
    top: list[tuple[int, float]] | None
    logits: bytes  # float32 [vocab]


class DecidedTokens:
    """Tokens that a reviser has decided on and whose scores are reported. They are computed as
    draft tokens, and masks allow no others.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[TokenScores] = []  # of the output tokens that were not sent
        self.settled = 0  # first output tokens that may be sent
        self.ending: FinishReason | None = None  # how the output ends after these tokens

    def propose(self, tokens: list[int], prompt_tokens: int, most: int) -> list[int]:
        return self.tokens[:most]

    def learn(self, proposed: int, accepted: int) -> None:
        """All are accepted."""


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

    submitted: GenerateRequest  # the request as the client sent it
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
    proposer: DraftProposer | AdaptiveLookup | DecidedTokens | None = None
    draft_tokens: Sequence[int] = ()  # draft tokens that are being computed
    prompt_source: Request | None = None  # an earlier request with the same prompt
    # requests with the same prompt that wait until this one has computed it
    dependents: list[Request] = field(default_factory=list)
    constraint: Constraint | None = None
    sent: int = 0  # output tokens that were sent, if it has a reviser
    unwritten: int = 0  # last tokens that the host decided on and the runner does not know
    scored: int = 0  # prompt positions whose scores were sent; of beams, the leader's counts
    stats: RequestStats = field(default_factory=RequestStats)

    sampling: SamplingParams = field(init=False)
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)  # maximum number of tokens, prompt included
    # the constraint, if it may revise the output
    reviser: Reviser | None = field(init=False, default=None)
    decided: DecidedTokens | None = field(init=False, default=None)  # if it scores its output, too

    def __post_init__(self) -> None:
        self.sampling = self.submitted.sampling
        self.prompt_tokens = len(self.submitted.prompt)
        self.limit = self.prompt_tokens + self.sampling.max_tokens
        if isinstance(self.constraint, Reviser) and self.sampling.revisable:
            self.reviser = self.constraint
            if self.sampling.scores_output:
                self.decided = DecidedTokens()
                self.proposer = self.decided

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

    @property
    def settled(self) -> int:
        """The number of tokens that never change, nor are computed again."""
        if self.reviser is None:
            return self.known
        # The last token that stays is computed again to score the first one that changes.
        return self.prompt_tokens + self.sent - (self.decided is not None)

    def replace_output(self, first: int, tokens: Sequence[int]) -> None:
        """Replace the output tokens from `first` on. Computed ones are computed again."""
        start = self.prompt_tokens + first
        self.tokens[start:] = tokens
        self.unwritten = len(tokens)
        self.scheduled = min(self.scheduled, start)
        self.committed = min(self.committed, start)

    def take_unsent(self, end: int) -> list[int]:
        """Return the output tokens before `end` that were not sent, and count them as sent."""
        start = self.sent
        self.sent = max(start, end)
        return self.tokens[self.prompt_tokens + start : self.prompt_tokens + self.sent]

    def retention_priority(self, block: int, block_tokens: int) -> RetentionPriority | None:
        """Return the retention priority of a block, by its index in the table."""
        retention = self.submitted.retention
        if retention is None:
            return None
        return retention.find_priority(block * block_tokens, self.prompt_tokens)

    def finish(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, f"request {self.submitted.request_id} finished twice"
        self.finish_reason = reason
