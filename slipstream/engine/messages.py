"""The messages between server and engine, as plain data. No torch here.

Server to engine: `GenerateRequest`, `Cancel`, `StatsPeriod`, `DropFrontEnd`, `Shutdown`. Engine to
server: one `EngineInfo` when the engine is ready, then one `StepOutputs` per step (parallel lists,
not objects) and regular `EngineStats`.

A server has one or several processes, its front ends. Front end 0 is the primary one, which starts
the engine. The high bits of a request id are the number of the front end that sent the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import cast

# Upper bounds, in seconds, of the histogram of queue times; the last bucket has none.
QUEUE_SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
RECENT_STEPS = 200  # steps whose records are kept
FRONTEND_SHIFT = 48  # request id >> FRONTEND_SHIFT: the front end that sent the request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop these requests. Each of them still finishes once, with this reason."""

    request_ids: list[int]
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class StatsPeriod:
    """Send `EngineStats` at most this often while there is work; 0: after each step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DropFrontEnd:
    """Stop all requests of a front end that has ended, and connect to the socket of its
    successor.
    """

    index: int
    socket: str  # a path that the successor binds


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop the engine. Running requests do not finish."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sizes of an engine, sent once when it is loaded and warmed up."""

    vocab_size: int
    max_sequence_tokens: int  # prompt + output of one request
    max_rows: int  # requests that run at the same time
    total_blocks: int
    block_tokens: int
    device: str
    dtype: str
    weight_bytes: int
    cache_bytes: int
    load_seconds: float
    step_bytes: int = 0  # activations of a step with the full token budget; 0: not measured
    graph_bytes: int = 0  # memory of captured CUDA graphs
    compressed_weight_bytes: int = 0  # 12-bit copies of weights for steps of few tokens
    max_beam_width: int = 1  # of one request
    # every layer has a sliding window, so that a sequence may be longer than the cache
    windowed: bool = False
    step_tokens: int = 0  # token budget of one step
    # what decided max_rows; one of memory.division.RowBound
    rows_bound: str = ""
    cache_dtype: str = ""  # of keys and values
    reuse: bool = True  # blocks of finished requests are kept for requests with the same prefix
    ranks: int = 1  # processes of the engine; sizes in bytes are those of one rank

    @classmethod
    def of_replicas(cls, infos: Sequence[EngineInfo]) -> EngineInfo:
        """Return the sizes of several replicas together: memory and capacity add up, and a request
        must fit any one of them.
        """
        sums = {name: sum(map(attrgetter(name), infos)) for name in _SUMMED_SIZES}
        least = {name: min(map(attrgetter(name), infos)) for name in _COMMON_SIZES}
        slowest = max(info.load_seconds for info in infos)
        return replace(infos[0], load_seconds=slowest, **sums, **least)


_SUMMED_SIZES = (
    "max_rows",
    "total_blocks",
    "weight_bytes",
    "cache_bytes",
    "step_bytes",
    "graph_bytes",
    "compressed_weight_bytes",
)
_COMMON_SIZES = ("max_sequence_tokens", "max_beam_width", "step_tokens")


@dataclass(slots=True)
class Scores:
    """Logits and log-probabilities of one request in one step. Logits are float32 bytes,
    [positions, vocab].
    """

    context_logits: bytes = b""  # logits of the next positions of the prompt
    generation_logits: bytes = b""  # logits of the step's tokens
    # log-probabilities of the next prompt tokens; the first token of a prompt has none
    prompt_log_probs: list[float] = field(default_factory=list)
    # the likeliest tokens in the place of each of these prompt tokens, if requested
    top_prompt_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    # the ranks of these prompt tokens by probability, from 1, if requested
    prompt_ranks: list[int] = field(default_factory=list)
    pooled: bytes = b""  # the pooled states of the prompt, float32 [size]

    def merge(self, newer: Scores) -> None:
        self.context_logits = _concatenate(self.context_logits, newer.context_logits)
        self.generation_logits = _concatenate(self.generation_logits, newer.generation_logits)
        self.prompt_log_probs += newer.prompt_log_probs
        self.top_prompt_log_probs += newer.top_prompt_log_probs
        self.prompt_ranks += newer.prompt_ranks
        self.pooled = newer.pooled or self.pooled


def _concatenate(first: bytes, second: bytes) -> bytes:
    """Concatenate two byte strings, in place where `first` is the result of an earlier call.

    Copying all earlier logits for each token would copy gigabytes in total.
    """
    if not first or not second:
        return first or second
    grown = first if isinstance(first, bytearray) else bytearray(first)
    grown += second
    return cast(bytes, grown)


@dataclass(frozen=True, slots=True)
class Timing:
    """Timestamps and counts of one request. Times are nanoseconds on time.monotonic_ns()'s clock;
    0: did not happen.
    """

    arrived_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    allocated_blocks: int = 0  # blocks of the KV cache, for prompt and output
    prompt_blocks: int = 0  # allocated blocks of the prompt
    reused_blocks: int = 0  # blocks found in the cache at the first start
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Beam:
    """One output of a beam search."""

    tokens: list[int]  # without the end token
    log_probs: list[float]  # one per token
    total_log_prob: float  # sum, the end token included
    finish_reason: str  # stop or length
    # logits of each token, if requested: float32 [tokens, vocab]
    generation_logits: bytes = b""


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step. Entry i: request_ids[i] got the next token_counts[i] of `tokens`."""

    request_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)  # "" while the request runs
    cached_tokens: list[int] = field(default_factory=list)  # prompt tokens found in the cache
    tokens: list[int] = field(default_factory=list)
    # one per token; nan where not requested
    log_probs: list[float] = field(default_factory=list)
    # request id → the likeliest tokens, per token
    top_log_probs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    # request id → error message, for finish reason "error"
    errors: dict[int, str] = field(default_factory=dict)
    # request id → beams, best first; sent once, when the request ends
    beams: dict[int, list[Beam]] = field(default_factory=dict)
    # request id → scores, if requested
    scores: dict[int, Scores] = field(default_factory=dict)
    # request id → timestamps, if requested; sent once, when the request ends
    timings: dict[int, Timing] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step: entry i is row `rows[i]`, which computed `counts[i]` tokens."""

    started_us: int  # in microseconds since 1970
    rows: list[int]
    epochs: list[int]  # with the row, they identify a request
    counts: list[int]
    samples: list[bool]  # whether the row had computed all its known tokens


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


_NOT_SUMMED = {"timestamp_us", "queue_counts", "recent_steps"}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and current gauges."""

    timestamp_us: int = 0  # when they were taken, in microseconds since 1970
    running: int = 0
    waiting: int = 0
    paused: int = 0  # waiting requests that were preempted
    context_requests: int = 0  # requests that computed prompt tokens in the last step
    context_tokens: int = 0  # prompt tokens of the last step
    generation_requests: int = 0  # running requests whose whole prompt is scheduled
    free_blocks: int = 0  # blocks that can be allocated: free, or idle in the cache
    cached_blocks: int = 0  # idle blocks that can be reused
    total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    failed: int = 0  # requests that finished with an error, refused ones included
    reused_blocks: int = 0  # blocks that new requests found in the cache
    queue_seconds: float = 0.0  # sum of the times between arrival and first step
    draft_tokens: int = 0  # draft tokens that were computed
    accepted_draft_tokens: int = 0  # draft tokens that became output
    adapters: int = 0  # adapters in the host's memory
    adapter_bytes: int = 0  # host memory of adapters
    adapter_loads: int = 0
    free_adapter_pages: int = 0  # pages in the device's memory for adapters
    # requests per bucket of QUEUE_SECONDS_BOUNDS
    queue_counts: list[int] = field(default_factory=lambda: [0] * (len(QUEUE_SECONDS_BOUNDS) + 1))
    # the steps since the statistics before these, at most RECENT_STEPS; of several replicas: none
    recent_steps: list[StepRecord] = field(default_factory=list)

    def plus_totals_of(self, before: EngineStats) -> EngineStats:
        """Return these statistics with the counters of the engine that this one replaced added."""
        totals = {name: getattr(self, name) + getattr(before, name) for name in _TOTALS}
        queue_counts = [
            own + past for own, past in zip(self.queue_counts, before.queue_counts, strict=True)
        ]
        return replace(self, queue_counts=queue_counts, **totals)

    @classmethod
    def of_replicas(cls, each: Sequence[EngineStats]) -> EngineStats:
        """Return the statistics of several replicas together: counters and gauges add up."""
        numbers = {one.name for one in fields(cls)} - _NOT_SUMMED
        sums = {name: sum(map(attrgetter(name), each)) for name in numbers}
        columns = zip(*(stats.queue_counts for stats in each), strict=True)
        return cls(
            timestamp_us=max(stats.timestamp_us for stats in each),
            queue_counts=[sum(column) for column in columns],
            **sums,
        )
