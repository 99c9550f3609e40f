"""What crosses the link between the server and the engine: plain data in columns. No torch here.

Server to engine: `GenerateRequest`, `Cancel`, `Shutdown`. Engine to server: one `EngineInfo` when
it can serve, then one `StepOutputs` a step (columns, not objects) and an `EngineStats` now and
then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

# The upper bounds, in seconds, of the classes that queue times are counted in; the last class has
# none.
QUEUE_SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop these requests. Each still gets its one finish, with this reason."""

    request_ids: list[int]
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish nothing more and leave."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once, when the engine is loaded and warm."""

    vocab_size: int
    max_sequence_tokens: int  # prompt + output of one request
    max_rows: int  # requests that run at once
    total_blocks: int
    block_tokens: int
    device: str
    dtype: str
    weight_bytes: int
    cache_bytes: int
    load_seconds: float
    step_bytes: int = 0  # what a full step takes beside weights and cache; 0: not measured
    graph_bytes: int = 0  # what captured steps hold
    copy_bytes: int = 0  # what copies of weights take that steps of few tokens read
    max_beam_width: int = 1  # of one request
    windowed: bool = False  # every layer forgets, so that a sequence may be longer than the cache


@dataclass(slots=True)
class Scores:
    """What a step tells of one request beside its tokens. Logits are float32 bytes, [positions,
    vocab].
    """

    context_logits: bytes = b""  # of the next positions of the prompt
    generation_logits: bytes = b""  # of the step's tokens
    # of the next tokens of the prompt, from its second on
    prompt_log_probs: list[float] = field(default_factory=list)

    def merge(self, newer: Scores) -> None:
        self.context_logits = _joined(self.context_logits, newer.context_logits)
        self.generation_logits = _joined(self.generation_logits, newer.generation_logits)
        self.prompt_log_probs += newer.prompt_log_probs


def _joined(first: bytes, second: bytes) -> bytes:
    """In place from the second time on: a copy of all before each token's logits would be gigabytes
    in the end.
    """
    if not first or not second:
        return first or second
    grown = first if isinstance(first, bytearray) else bytearray(first)
    grown += second
    return cast(bytes, grown)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's way through the engine; times are nanoseconds on time.monotonic_ns()'s clock,
    0: never came.
    """

    arrived_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    allocated_blocks: int = 0  # of the KV cache, for prompt and answer
    prompt_blocks: int = 0  # of those, for the prompt
    reused_blocks: int = 0  # found in the cache when it first started
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Beam:
    """One way on from the prompt that beam search found."""

    tokens: list[int]  # without the end mark
    log_probs: list[float]  # one a token
    total_log_prob: float  # of the whole, the end mark included
    finish_reason: str  # stop or length
    # of each token, where they were asked for: float32 [tokens, vocab]
    generation_logits: bytes = b""


@dataclass(slots=True)
class StepOutputs:
    """The news of one step. Row i tells of request_ids[i]: it got the next token_counts[i] of
    `tokens`.
    """

    request_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)  # "" while it runs
    cached_tokens: list[int] = field(default_factory=list)  # prompt tokens that came from the cache
    tokens: list[int] = field(default_factory=list)
    # one a token; nan where not asked for; [] when nobody asked
    log_probs: list[float] = field(default_factory=list)
    # request id → per token
    top_log_probs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    # request id → why, for finish reason "error"
    errors: dict[int, str] = field(default_factory=dict)
    # request id → best first, once, when it ends
    beams: dict[int, list[Beam]] = field(default_factory=dict)
    # request id → numbers that only some ask for
    scores: dict[int, Scores] = field(default_factory=dict)
    # request id → of those that ended, once each
    timings: dict[int, Timing] = field(default_factory=dict)


_TOTALS = (
    "steps",
    "prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "finished",
    "cancelled",
    "preemptions",
    "failed",
    "reused_blocks",
    "queue_seconds",
    "draft_tokens",
    "accepted_draft_tokens",
    "adapter_loads",
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges of now."""

    running: int = 0
    waiting: int = 0
    paused: int = 0  # of those that wait: ran before and gave way
    context_requests: int = 0  # computed some of their prompt in the last step
    context_tokens: int = 0  # prompt tokens of the last step
    generation_requests: int = 0  # have their whole prompt computed
    free_blocks: int = 0  # can be handed out: never used, or idle in the cache
    cached_blocks: int = 0  # idle but reusable
    total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    failed: int = 0  # finished with an error, those never admitted included
    reused_blocks: int = 0  # found in the cache by a new request
    queue_seconds: float = 0.0  # spent between arrival and the first step, all requests together
    draft_tokens: int = 0  # guesses that were computed
    accepted_draft_tokens: int = 0  # of them, those that were right
    adapters: int = 0  # in the host's memory
    adapter_bytes: int = 0  # of the host's memory
    adapter_loads: int = 0
    free_adapter_pages: int = 0  # of the device's memory for adapters
    total_adapter_pages: int = 0
    # by upper bound
    queue_counts: list[int] = field(default_factory=lambda: [0] * (len(QUEUE_SECONDS_BOUNDS) + 1))

    def after(self, before: EngineStats) -> EngineStats:
        """With what the engine in whose place this one came had counted; gauges are this one's."""
        totals = {name: getattr(self, name) + getattr(before, name) for name in _TOTALS}
        queue_counts = [
            own + past for own, past in zip(self.queue_counts, before.queue_counts, strict=True)
        ]
        return replace(self, queue_counts=queue_counts, **totals)
