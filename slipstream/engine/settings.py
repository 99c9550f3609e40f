"""How an engine is run, as plain data. No torch here: the server writes it, the engine process reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Policy = Literal["guaranteed_no_evict", "max_utilization"]


@dataclass(frozen=True)
class EngineSettings:
    """The defaults serve any model on any machine; None means "decided from the model and the machine"."""

    dtype: str = "auto"  # or bfloat16, float16, float32
    device: str = "auto"  # or cpu, cuda
    max_rows: int = 64  # requests that run at once
    step_tokens: int | None = None  # the budget of one step
    block_tokens: int = 32
    cache_tokens: int | None = None  # size of the KV pool
    cache_memory_fraction: float = 0.9  # of the memory left after the weights, when cache_tokens is None
    max_sequence_tokens: int | None = None  # prompt + output of one request; at most what the engine folder allows
    policy: Policy = "guaranteed_no_evict"
    reuse: bool = True  # keep finished blocks for requests with the same prefix
    chunked: bool = True  # a long prompt may be spread over several steps
    threads: int | None = None  # CPU threads; None: the cores this process may use

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {self.max_rows}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, not {self.step_tokens}")
        if self.policy not in ("guaranteed_no_evict", "max_utilization"):
            raise ValueError(f"policy must be guaranteed_no_evict or max_utilization, not {self.policy!r}")
        if not 0.0 < self.cache_memory_fraction <= 1.0:
            raise ValueError(f"cache_memory_fraction must be in (0, 1], not {self.cache_memory_fraction}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EngineSettings:
        return cls(**values)
