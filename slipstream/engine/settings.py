"""The settings of an engine, as plain data. No torch here: the server writes them, the engine
process reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from slipstream.kernels.options import KernelOptions

Policy = Literal["guaranteed_no_evict", "max_utilization"]
CacheType = Literal["auto", "fp8"]
MAX_RANK = 256  # of an adapter
MAX_REPLICAS = 64


@dataclass(frozen=True)
class EngineSettings:
    """The defaults suit any model on any machine. None means "decided from the model and the
    machine".
    """

    dtype: str = "auto"  # auto, bfloat16, float16 or float32
    device: str = "auto"  # auto, cpu or cuda
    max_rows: int | None = None  # requests that run at the same time
    step_tokens: int | None = None  # token budget of one step
    # milliseconds that a step with running streams may take: prompts are computed in smaller chunks
    target_itl_ms: float | None = None  # None: any time
    block_tokens: int = 32
    cache_tokens: int | None = None  # size of the KV cache
    cache_bytes: int | None = None  # the same in bytes; it overrides cache_tokens
    # share of the GPU memory left after the weights, when the size of the cache is None
    cache_memory_fraction: float = 0.9
    # share of the whole GPU memory that the engine may take, weights included, in place of
    # cache_memory_fraction
    gpu_memory_utilization: float | None = None
    # share of the device's memory for this model's engines together; other models have the rest
    memory_share: float = 1.0
    # fp8: 8-bit keys and values, if the device has instructions for them; auto: as built
    cache_dtype: CacheType = "auto"
    # prompt + output of one request; at most what the engine folder allows
    max_sequence_tokens: int | None = None
    policy: Policy = "guaranteed_no_evict"
    reuse: bool = True  # keep the blocks of finished requests for requests with the same prefix
    chunked: bool = True  # a long prompt may be spread over several steps
    # CPU threads of each process; None: the cores that this process may use, divided among the
    # replicas and their ranks
    threads: int | None = None
    # processes that compute the model together, each with a part of its weights; None: one
    ranks: int | None = None
    # ranks that a launcher such as mpirun asks for, if there are as many GPUs; None: as built
    wanted_ranks: int | None = None
    max_beam_width: int | None = None  # of one request; None: as many as rows, at most 64
    # attention windows of the layers, repeated from the first; empty: the model's own
    attention_windows: Sequence[int] = ()
    sink_tokens: int = 0  # part of a window that covers the first tokens of the sequence
    host_cache_bytes: int = 0  # host memory for blocks evicted from the KV cache
    overlap: bool = True  # on a GPU: plan the next step while one runs
    # draft tokens per step from prompt lookup; 0: none
    lookup_tokens: int = 0
    # on a CPU: draft tokens for a stream that runs alone, as many as save time
    adaptive_lookup: bool = False
    # adapter rank that fills one page of the device's memory for adapters
    adapter_page_rank: int = 8
    adapter_max_rank: int = 64
    # share of the GPU memory left after weights and KV cache, for adapters in use
    adapter_memory_fraction: float = 0.05
    adapter_host_bytes: int = 2**30  # host memory for adapters that are not in use
    # the same tokens for a request whatever runs beside it, in every type; slower
    deterministic: bool = False
    # Optimisations of the GPU that a person debugging may turn off; see KernelOptions.
    compressed_weights: bool = True  # 12-bit copies of bf16 weights for steps of few tokens
    compressed_kv_cache: bool = True  # bf16 keys and values in 12 bits
    fused_gemv: bool = True  # one kernel for GEMV, residual addition and norm in one-token steps
    mixed_graphs: bool = True  # CUDA graphs of steps that mix decodes with few prompt tokens
    # compiled code of a CPU: auto, off (torch instead), or the name of an instruction level
    cpu_code: str = "auto"
    # on a CPU, multiply quantised weights by activations of 16 bits, not of 8
    exact_activations: bool = False
    replicas: int = 1  # engines of this model behind one server
    replica: int = 0  # index of this engine among them
    # GPUs of all replicas in order, one for each rank, as numbered within CUDA_VISIBLE_DEVICES.
    # Empty: the ranks take the GPUs in turn. No effect on a CPU
    devices: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_adapters()
        self._check_attention()
        self._check_replicas()

    def _check_sizes(self) -> None:
        self._check_at_least(1, "max_rows", "block_tokens", "step_tokens", "max_beam_width")
        self._check_at_least(1, "cache_bytes", "cache_tokens", "max_sequence_tokens", "ranks")
        self._check_not_negative("host_cache_bytes", "lookup_tokens")
        self._check_fraction("cache_memory_fraction")
        self._check_fraction("gpu_memory_utilization")
        self._check_fraction("memory_share")
        self._check_target()
        self._check_one_of("policy", get_args(Policy))
        self._check_one_of("cache_dtype", get_args(CacheType))

    def _check_target(self) -> None:
        if self.target_itl_ms is None:
            return
        if not 0.0 < self.target_itl_ms < math.inf:
            raise ValueError(f"target_itl_ms must be positive, not {self.target_itl_ms}")
        if not self.chunked:
            raise ValueError(
                "target_itl_ms needs prompts in chunks: set chunked (enable_chunked_context), or "
                "remove target_itl_ms"
            )

    def _check_adapters(self) -> None:
        self._check_at_least(1, "adapter_host_bytes")
        self._check_fraction("adapter_memory_fraction")
        if not 1 <= self.adapter_page_rank <= self.adapter_max_rank <= MAX_RANK:
            raise ValueError(
                f"adapter ranks must rise from 1 to {MAX_RANK}: a page's rank "
                f"{self.adapter_page_rank}, the largest {self.adapter_max_rank}"
            )

    def _check_attention(self) -> None:
        if any(window < 1 for window in self.attention_windows):
            raise ValueError(
                f"attention windows must be at least 1, not {list(self.attention_windows)}"
            )
        narrowest = min(self.attention_windows, default=0)
        if self.sink_tokens < 0 or (self.sink_tokens and self.sink_tokens >= narrowest):
            raise ValueError(
                f"{self.sink_tokens} sink tokens need a larger attention window than themselves"
            )

    def _check_replicas(self) -> None:
        self._check_at_least(1, "replicas")
        problem = replicas_problem(self.replicas, self.devices, self.ranks)
        if problem:
            raise ValueError(problem)
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} is not one of {self.replicas} replicas")

    def _check_at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    def _check_not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    def _check_fraction(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not 0.0 < value <= 1.0:
            raise ValueError(f"{name} must be in (0, 1], not {value}")

    def _check_one_of(self, name: str, allowed: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(allowed)}, not {value!r}")

    @property
    def kernel_options(self) -> KernelOptions:
        fastest = not self.deterministic  # kernels that are chosen by the tokens of a step
        return KernelOptions(
            compressed_weights=self.compressed_weights and fastest,
            compressed_kv_cache=self.compressed_kv_cache and fastest,
            fused_gemv=self.fused_gemv and fastest,
            mixed_graphs=self.mixed_graphs and fastest,
            deterministic=self.deterministic,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EngineSettings:
        return cls(**values)


def replicas_problem(replicas: int, devices: Sequence[int], ranks: int | None = None) -> str:
    """Return why an engine cannot run as these replicas on these GPUs; empty: it can."""
    if not 1 <= replicas <= MAX_REPLICAS:
        return f"replicas must be 1 to {MAX_REPLICAS}, not {replicas}"
    if any(device < 0 for device in devices):
        return f"devices must be GPU numbers from 0 on, not {list(devices)}"
    if len(devices) % replicas:
        return (
            f"{len(devices)} GPUs cannot be shared equally by {replicas} replicas: give each "
            "replica as many GPUs"
        )
    if devices and ranks is not None and len(devices) != replicas * ranks:
        return f"{len(devices)} GPUs for {replicas} replicas of {ranks} ranks: give each rank one"
    return ""
