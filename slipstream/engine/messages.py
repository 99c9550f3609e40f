"""What crosses the link between the server and the engine: plain data in columns. No torch here.

Server to engine: `GenerateRequest`, `Cancel`, `Shutdown`. Engine to server: one `EngineInfo` when it can
serve, then one `StepOutputs` a step (columns, not objects) and an `EngineStats` now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The upper bounds, in seconds, of the classes that queue times are counted in; the last class has none.
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


@dataclass(slots=True)
class StepOutputs:
    """The news of one step. Row i tells of request_ids[i]: it got the next token_counts[i] of `tokens`."""

    request_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)  # "" while it runs
    cached_tokens: list[int] = field(default_factory=list)  # prompt tokens that came from the cache
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # one a token; nan where not asked for; [] when nobody asked
    top_log_probs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)  # request id → per token
    errors: dict[int, str] = field(default_factory=dict)  # request id → why, for finish reason "error"


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
    queue_counts: list[int] = field(default_factory=lambda: [0] * (len(QUEUE_SECONDS_BOUNDS) + 1))  # by upper bound
