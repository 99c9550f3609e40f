"""What crosses the link between the server and the engine: plain data in columns. No torch here.

Server to engine: `GenerateRequest`, `Cancel`, `Shutdown`. Engine to server: one `EngineInfo` when it can
serve, then one `StepOutputs` a step (columns, not objects) and an `EngineStats` now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
