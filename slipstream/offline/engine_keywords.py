"""The settings of an engine as keywords of `slipstream.LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from slipstream.engine.settings import CacheType, Policy


class EngineKeywords(TypedDict, total=False):
    """The names of the flags of `slipstream start`, then the fields of `EngineSettings`."""

    max_batch_size: int | None
    max_num_seqs: int | None
    max_seq_len: int | None
    max_model_len: int | None
    max_num_tokens: int | None
    max_num_batched_tokens: int | None
    kv_cache_free_gpu_mem_fraction: float
    kv_cache_free_gpu_memory_fraction: float
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | str | None  # a number, or text such as 512M
    kv_cache_dtype: CacheType
    enable_prefix_caching: bool
    enable_kv_cache_reuse: bool
    enable_chunked_prefill: bool
    enable_chunked_context: bool
    scheduler_policy: Policy
    batch_scheduler_policy: Policy
    tensor_parallel_size: int | None
    device: str
    max_rows: int | None
    step_tokens: int | None
    target_itl_ms: float | None
    block_tokens: int
    cache_tokens: int | None
    cache_bytes: int | str | None
    cache_memory_fraction: float
    memory_share: float
    cache_dtype: CacheType
    max_sequence_tokens: int | None
    policy: Policy
    reuse: bool
    chunked: bool
    threads: int | None
    ranks: int | None
    wanted_ranks: int | None
    max_beam_width: int | None
    attention_windows: Sequence[int]
    sink_tokens: int
    host_cache_bytes: int
    overlap: bool
    lookup_tokens: int
    adaptive_lookup: bool
    adapter_page_rank: int
    adapter_max_rank: int
    adapter_memory_fraction: float
    adapter_host_bytes: int
    deterministic: bool
    compressed_weights: bool
    compressed_kv_cache: bool
    fused_gemv: bool
    mixed_graphs: bool
    cpu_code: str
    exact_activations: bool
    replicas: int  # only 1: more are a setting of servers
    replica: int
    devices: Sequence[int]
