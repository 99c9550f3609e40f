"""How an engine is run, as plain data. No torch here: the server writes it, the engine process
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Policy = Literal["guaranteed_no_evict", "max_utilization"]
MOST_RANK = 256  # of an adapter


@dataclass(frozen=True)
class EngineSettings:
    """The defaults serve any model on any machine; None means "decided from the model and the
    machine".
    """

    dtype: str = "auto"  # or bfloat16, float16, float32
    device: str = "auto"  # or cpu, cuda
    max_rows: int = 64  # requests that run at once
    step_tokens: int | None = None  # the budget of one step
    block_tokens: int = 32
    cache_tokens: int | None = None  # size of the KV pool
    # of the memory left after the weights, when cache_tokens is None
    cache_memory_fraction: float = 0.9
    # prompt + output of one request; at most what the engine folder allows
    max_sequence_tokens: int | None = None
    policy: Policy = "guaranteed_no_evict"
    reuse: bool = True  # keep finished blocks for requests with the same prefix
    chunked: bool = True  # a long prompt may be spread over several steps
    threads: int | None = None  # CPU threads; None: the cores this process may use
    max_beam_width: int | None = None  # of one request; None: as many as there are rows
    # tokens that layers look back at most, in turn; none: as the model has it
    attention_windows: Sequence[int] = ()
    sink_tokens: int = 0  # of a window, how many are the first of the sequence instead of the last
    host_cache_bytes: int = 0  # of the host's memory, for blocks that the KV pool has no room for
    overlap: bool = True  # on a GPU: the next step is planned while one runs
    # guesses a step, at what follows where the end of a text was written before; 0: none
    lookup_tokens: int = 0
    # an adapter of this rank fills one page of the device's memory for adapters
    adapter_page_rank: int = 8
    adapter_max_rank: int = 64
    # of the GPU memory left beside weights and KV cache, for adapters in use
    adapter_memory_fraction: float = 0.05
    adapter_host_bytes: int = 2**30  # for adapters that wait to be used again

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {self.max_rows}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, not {self.step_tokens}")
        if self.policy not in ("guaranteed_no_evict", "max_utilization"):
            raise ValueError(
                f"policy must be guaranteed_no_evict or max_utilization, not {self.policy!r}"
            )
        if not 1 <= self.adapter_page_rank <= self.adapter_max_rank <= MOST_RANK:
            raise ValueError(
                f"adapter ranks must rise from 1 to {MOST_RANK}: a page's rank {self.adapter_page_rank}, "
                f"the largest {self.adapter_max_rank}"
            )
        if not 0.0 < self.adapter_memory_fraction <= 1.0:
            raise ValueError(
                f"adapter_memory_fraction must be in (0, 1], not {self.adapter_memory_fraction}"
            )
        if self.adapter_host_bytes < 1:
            raise ValueError(
                f"adapter_host_bytes must be at least 1, not {self.adapter_host_bytes}"
            )
        if not 0.0 < self.cache_memory_fraction <= 1.0:
            raise ValueError(
                f"cache_memory_fraction must be in (0, 1], not {self.cache_memory_fraction}"
            )

        if self.max_beam_width is not None and self.max_beam_width < 1:
            raise ValueError(f"max_beam_width must be at least 1, not {self.max_beam_width}")
        if any(window < 1 for window in self.attention_windows):
            raise ValueError(
                f"attention windows must be at least 1, not {list(self.attention_windows)}"
            )
        if self.sink_tokens < 0 or (
            self.sink_tokens and self.sink_tokens >= min(self.attention_windows, default=0)
        ):
            raise ValueError(
                f"{self.sink_tokens} sink tokens need a larger attention window than themselves"
            )
        if self.host_cache_bytes < 0:
            raise ValueError(f"host_cache_bytes must not be negative, got {self.host_cache_bytes}")
        if self.lookup_tokens < 0:
            raise ValueError(f"lookup_tokens must not be negative, got {self.lookup_tokens}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EngineSettings:
        return cls(**values)
