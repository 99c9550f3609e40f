"""Creates an engine from weights and settings: divides the memory and runs everything once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.adapters.loader import (
    AdapterSizes,
    ReadFolder,
    create_adapters,
    create_store,
)
from slipstream.engine.adapters.store import AdapterStore
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.host_cache import HostCache
from slipstream.engine.cache.window import Window
from slipstream.engine.cpu.choice import CpuPath, choose_path, create_runner
from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.loop import EngineLoop, Progress, StepRunner, warm_up
from slipstream.engine.memory import division
from slipstream.engine.memory.host import read_host_memory
from slipstream.engine.memory.placement import cpu_threads, place_rank
from slipstream.engine.messages import EngineInfo
from slipstream.engine.ranks.following import Follower
from slipstream.engine.ranks.leading import LeadingRunner
from slipstream.engine.ranks.orders import Followers
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.settings import EngineSettings
from slipstream.engine.step_budget import PromptLimits, PromptSpread, StepBudget
from slipstream.kernels import packed_cache
from slipstream.kernels.options import KernelOptions
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.position import rotary_size
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Transformer
from slipstream.version import VERSION

if TYPE_CHECKING:
    from slipstream.kernels.gpu.compilation.pool import CompilePool

# A CPU computes about this many prompt tokens before other requests notice the delay.
_CPU_STEP_TOKENS = 512
# Enough to keep a GPU's tensor cores busy; more only delays other requests.
_GPU_STEP_TOKENS = 8192


# One thread for the masks of guided requests: the matchers of a grammar share a lock, and a thread
# that waits for it stops all others. On a CPU it would take a core from the model.
_REVISION_THREADS = 1


@dataclass(frozen=True, slots=True)
class BuiltLimits:
    """What the engine folder says about the sizes of an engine. None: nothing."""

    longest: int  # prompt + output
    step_tokens: int | None = None  # the most tokens of a step, unless the settings say more
    rows: int | None = None  # the most rows, unless the settings say more
    fp8_cache: bool = False  # keys and values in 8 bits, if the device has instructions for that


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of an engine, as the leading one sees them."""

    ranks: Ranks
    whole_spec: ModelSpec
    followers: Followers


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine that do not depend on its memory."""

    device: torch.device
    dtype: torch.dtype
    longest: int  # tokens of the longest sequence
    step_tokens: int  # token budget of one step
    depth: int = 1  # plans in flight
    sharing: int = 1  # processes on the device, this one included, which share its memory


def create_engine(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    longest_sequence: int,
    progress: Progress = lambda phase, done, total: None,
    read_adapter: ReadFolder | None = None,
    fp8_cache: bool = False,
    most_step_tokens: int | None = None,
    most_rows: int | None = None,
    compiler: CompilePool | None = None,
    group: RankGroup | None = None,
    code_folder: Path | None = None,
) -> EngineLoop:
    """Create an engine from weights in memory. `tensors` is emptied. For weights on disk, see
    `weights.load.start_engine`.

    longest_sequence: prompt + output that the engine folder allows.
    most_step_tokens: tokens per step that the engine folder allows, unless the settings say more.
    most_rows: rows that the engine folder allows, unless the settings say more.
    read_adapter: reads the folders of adapters; without it, adapters come with requests only.
    fp8_cache: keep keys and values in 8 bits, if the device has instructions for that.
    compiler: processes that compile the kernels of a GPU; None: they compile when first launched.
    group: the other ranks; spec and tensors are then those of this rank, the leading one.
    code_folder: where compiled code for a CPU is kept; None: it is compiled in memory.
    """
    began = time.monotonic()
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    ranks = ALONE if group is None else group.ranks
    limits = BuiltLimits(longest_sequence, most_step_tokens, most_rows, fp8_cache)
    prepared = _prepare(spec, tensors, settings, limits, progress, compiler, ranks, code_folder)
    runner: StepRunner = prepared.runner
    leader: LeadingRunner | None = None
    if group is not None:
        runner = leader = LeadingRunner(runner, group.followers)
    adapters = create_adapters(
        spec if group is None else group.whole_spec,
        settings,
        prepared.store,
        prepared.adapter_sizes,
        read_adapter,
        leader,
        ranks.size,
    )
    scheduler = _create_scheduler(prepared, settings, adapters.cache)
    loaded = time.monotonic() - began
    info = _describe(scheduler, settings, prepared, ranks.size, weight_bytes, loaded)
    return EngineLoop(scheduler, runner, info, prepared.sizes.depth, adapters, leader)


def create_follower(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    limits: BuiltLimits,
    ranks: Ranks,
) -> Follower:
    """Create a following rank from its part of the weights. `tensors` is emptied."""
    prepared = _prepare(spec, tensors, settings, limits, _no_progress, None, ranks)
    return Follower(prepared.runner, prepared.store)


def _no_progress(phase: str, done: int, total: int) -> None:
    """The leading rank shows the progress of all."""


def _prepare(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    limits: BuiltLimits,
    progress: Progress,
    compiler: CompilePool | None,
    ranks: Ranks,
    code_folder: Path | None = None,
) -> _Prepared:
    """Create what every rank has: the model, its memory and the warm runner. All ranks choose the
    same sizes.
    """
    sizes = _choose_sizes(settings, limits, ranks)
    ranks.meet(_describe_machine(sizes))
    path = choose_path(spec, tensors, settings.cpu_code, sizes.device, sizes.dtype, ranks.size)
    model = _create_model(spec, tensors, settings, sizes, limits.fp8_cache, ranks, path)
    parts = _divide_memory(model, settings, sizes, limits.rows, ranks)
    if isinstance(model, CpuModel):
        threads = cpu_threads(settings, usable_cores(), ranks.size)
        shape = (parts.blocks, settings.block_tokens, parts.rows, sizes.longest)
        warm = _WarmRunner(create_runner(model, path, threads, *shape, code_folder, progress))
    else:
        warm = _prepare_runner(
            model, settings.block_tokens, sizes, parts, progress, compiler, ranks
        )
    slots = _add_host_cache(warm.runner, settings, parts.blocks, ranks)
    store, adapter_sizes = create_store(
        spec, settings, parts.rows, sizes.dtype, sizes.device, ranks
    )
    return _Prepared(model, sizes, parts, warm, slots, store, adapter_sizes)


def _describe_machine(sizes: EngineSizes) -> str:
    """Return what must be the same on all ranks, so that they compute the same bits."""
    device = "a CPU"
    if sizes.device.type == "cuda":
        device = torch.cuda.get_device_name(sizes.device)
    return f"slipstream {VERSION}, torch {torch.__version__}, {device}, {sizes.dtype}"


def _describe(
    scheduler: Scheduler,
    settings: EngineSettings,
    prepared: _Prepared,
    ranks: int,
    weight_bytes: int,
    load_seconds: float,
) -> EngineInfo:
    sizes = prepared.sizes
    parts = prepared.parts
    warm = prepared.warm
    return EngineInfo(
        vocab_size=scheduler.vocab_size,
        max_sequence_tokens=sizes.longest,
        max_rows=parts.rows,
        total_blocks=parts.blocks,
        block_tokens=settings.block_tokens,
        device=str(sizes.device),
        dtype=str(sizes.dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        cache_bytes=warm.runner.cache.nbytes,
        load_seconds=load_seconds,
        step_bytes=warm.step_bytes,
        graph_bytes=warm.graph_bytes,
        compressed_weight_bytes=parts.copy_bytes,
        max_beam_width=scheduler.capacity.beam_width,
        windowed=scheduler.window is not None,
        step_tokens=sizes.step_tokens,
        rows_bound=parts.rows_bound,
        cache_dtype=_describe_cache_dtype(warm.runner.cache.dtype),
        reuse=settings.reuse,
        ranks=ranks,
    )


def _describe_cache_dtype(dtype: torch.dtype) -> str:
    names = {packed_cache.DTYPE: "bfloat16 in 12 bits", torch.float8_e4m3fn: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _choose_sizes(settings: EngineSettings, limits: BuiltLimits, ranks: Ranks) -> EngineSizes:
    device, sharing = _place(settings, ranks)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(cpu_threads(settings, usable_cores(), ranks.local_size))
    usual = _GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS
    longest = min(limits.longest, settings.max_sequence_tokens or limits.longest)
    step_tokens = settings.step_tokens or min(usual, limits.step_tokens or usual)
    return EngineSizes(
        device=device,
        dtype=_dtype_on(device, settings),
        longest=longest,
        # Without chunks a whole prompt must fit one step.
        step_tokens=step_tokens if settings.chunked else max(step_tokens, longest),
        depth=2 if on_gpu and settings.overlap else 1,
        sharing=sharing,
    )


def _create_model(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    sizes: EngineSizes,
    fp8_cache: bool,
    ranks: Ranks,
    path: CpuPath,
) -> Transformer | CpuModel:
    fp8_cache = fp8_cache or settings.cache_dtype == "fp8"
    options = settings.kernel_options
    cache_dtype = _cache_dtype(
        spec, sizes.dtype, sizes.device, settings.block_tokens, fp8_cache, options
    )
    model: Transformer | CpuModel
    if path.level is not None:
        model = CpuModel(spec, tensors, sizes.dtype, sizes.longest, options)
    else:
        model = Transformer(
            spec, tensors, sizes.dtype, sizes.device, sizes.longest, cache_dtype, options, ranks
        )
    # A wider window covers every sequence.
    if min(settings.attention_windows, default=sizes.longest) < sizes.longest:
        model.set_attention_windows(settings.attention_windows, settings.sink_tokens)
    tensors.clear()  # the model has copied what it lays out in another way
    return model


class MemoryParts(NamedTuple):
    """How the memory of the device is divided."""

    rows: int  # requests that run at the same time
    blocks: int  # of the KV cache, without the null block
    copy_bytes: int = 0  # 12-bit copies of weights
    rows_bound: division.RowBound = "default"  # what decided the number of rows


class _WarmRunner(NamedTuple):
    runner: StepRunner
    step_bytes: int = 0  # GPU memory that a step with the full budget takes
    graph_bytes: int = 0  # GPU memory of captured steps
    tokens_per_second: float = 0.0  # prompt tokens of such a step on a GPU; 0: not measured


class _Prepared(NamedTuple):
    """What every rank has."""

    model: Transformer | CpuModel
    sizes: EngineSizes
    parts: MemoryParts
    warm: _WarmRunner
    host_slots: int  # of evicted blocks
    store: AdapterStore
    adapter_sizes: AdapterSizes

    @property
    def runner(self) -> StepRunner:
        return self.warm.runner


def _prepare_runner(
    model: Transformer,
    block_tokens: int,
    sizes: EngineSizes,
    parts: MemoryParts,
    progress: Progress,
    compiler: CompilePool | None,
    ranks: Ranks,
) -> _WarmRunner:
    """Create the runner of this device and warm it up."""
    if model.device.type == "cuda":
        # needs Triton, which a CPU installation lacks
        from slipstream.engine.gpu.runner import GpuRunner
        from slipstream.engine.gpu.warm_up import GpuWarmUp

        gpu_runner = GpuRunner(model, parts.blocks, block_tokens, parts.rows, sizes.longest)
        steps = GpuWarmUp(
            gpu_runner, parts.rows, sizes.step_tokens, sizes.longest, parts.blocks, ranks
        )
        steps.compile_kernels(compiler, progress)
        return _WarmRunner(gpu_runner, *steps.run(progress))
    runner = Runner(model, parts.blocks, block_tokens, parts.rows, sizes.longest)
    warm_up(runner, model.spec.vocab_size, parts.blocks, sizes.longest)
    return _WarmRunner(runner)


def _add_host_cache(runner: StepRunner, settings: EngineSettings, blocks: int, ranks: Ranks) -> int:
    """Add host memory for evicted blocks to the runner; return how many fit. The ranks share it."""
    own_bytes = settings.host_cache_bytes // ranks.size
    slots = ranks.least(division.host_slots(own_bytes, runner.cache.nbytes, blocks))
    if slots and settings.reuse:
        runner.host = HostCache(runner.cache, slots, settings.block_tokens)
    return slots


def _create_scheduler(
    prepared: _Prepared, settings: EngineSettings, adapters: AdapterCache
) -> Scheduler:
    sizes = prepared.sizes
    parts = prepared.parts
    model = prepared.model
    pool = BlockPool(parts.blocks, settings.block_tokens, settings.reuse, prepared.host_slots)
    return Scheduler(
        pool,
        parts.rows,
        sizes.step_tokens,
        sizes.longest,
        model.spec.vocab_size,
        settings.policy,
        settings.chunked,
        max_beam_width=settings.max_beam_width,
        lookup_tokens=settings.lookup_tokens,
        adapters=adapters,
        window=Window.from_rules((layer.rule for layer in model.layers), sizes.longest),
        revision_threads=_REVISION_THREADS if sizes.device.type == "cuda" else 0,
        prompt_limits=_prompt_limits(settings, sizes.step_tokens, prepared.warm.tokens_per_second),
    )


def _prompt_limits(
    settings: EngineSettings, step_tokens: int, tokens_per_second: float
) -> PromptLimits:
    target = None
    if settings.target_itl_ms is not None:
        target = StepBudget(settings.target_itl_ms / 1000, step_tokens)
    return PromptLimits(target, PromptSpread(tokens_per_second) if tokens_per_second else None)


def usable_cores() -> int:
    """Return the number of cores that this process may use; fewer than the machine's in a
    container.
    """
    return len(os.sched_getaffinity(0))


def _place(settings: EngineSettings, ranks: Ranks) -> tuple[torch.device, int]:
    """Return the device of this rank and how many processes are on it."""
    device = _device(settings)
    if device.type != "cuda":
        return device, settings.replicas * ranks.local_size
    gpus = torch.cuda.device_count()
    placement = place_rank(settings, ranks.local_rank, ranks.local_size, gpus)
    if placement.device is None:
        return device, placement.sharing
    torch.cuda.set_device(placement.device)  # Triton launches kernels on the current device
    return torch.device("cuda", placement.device), placement.sharing


def run_dtype(settings: EngineSettings) -> torch.dtype:
    """Return the type that an engine with these settings computes in."""
    return _dtype_on(_device(settings), settings)


def _dtype_on(device: torch.device, settings: EngineSettings) -> torch.dtype:
    found: torch.dtype = getattr(torch, _dtype_name(settings.dtype, device.type == "cuda"))
    return found


def _device(settings: EngineSettings) -> torch.device:
    nvidia = torch.version.hip is None  # torch calls AMD's GPUs cuda, too
    if settings.device == "auto":
        return torch.device("cuda" if nvidia and torch.cuda.is_available() else "cpu")
    if settings.device.startswith("cuda") and not nvidia:
        raise ValueError(
            "device: this torch is for AMD's GPUs, the kernels are for NVIDIA's; use the device cpu"
        )
    return torch.device(settings.device)


def _cache_dtype(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
    fp8_cache: bool,
    options: KernelOptions = KernelOptions(),
) -> torch.dtype:
    """Return the type of cached keys and values."""
    rotated = rotary_size(spec) if spec.position == "rope" else 0
    return packed_cache.kv_cache_dtype(
        dtype, device, spec.head_size, rotated, block_tokens, fp8_cache, options
    )


def _dtype_name(dtype: str, on_gpu: bool) -> str:
    if dtype == "auto":
        # On a CPU the caller, which can probe the machine safely, chooses bfloat16.
        return "bfloat16" if on_gpu else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return dtype


def _divide_memory(
    model: Transformer | CpuModel,
    settings: EngineSettings,
    sizes: EngineSizes,
    most_rows: int | None,
    ranks: Ranks,
) -> MemoryParts:
    """Divide the memory that the weights leave free, and make 12-bit copies of weights.

    All ranks have as many rows and blocks as the one with the least memory.
    """
    sequence = division.SequenceSizes(
        block_bytes=model.cached_bytes * settings.block_tokens,
        block_tokens=settings.block_tokens,
        longest=sizes.longest,
        vocab_size=model.spec.vocab_size,
    )
    limits = division.RowLimits(settings.max_rows, most_rows)
    if model.device.type == "cuda":
        assert not isinstance(model, CpuModel)
        return _divide_gpu_memory(model, settings, sizes, sequence, limits, ranks)
    host = read_host_memory()
    wanted = division.cache_tokens(settings.cache_tokens, settings.cache_bytes, sequence)
    available = ranks.least(
        division.cpu_share(host, sizes.sharing, wanted is not None, settings.memory_share)
    )
    blocks = division.cpu_blocks(available, sequence, wanted)
    rows, bound = division.cpu_rows(available, sequence, sizes.step_tokens, blocks, limits)
    return MemoryParts(rows, blocks, rows_bound=bound)


def _divide_gpu_memory(
    model: Transformer,
    settings: EngineSettings,
    sizes: EngineSizes,
    sequence: division.SequenceSizes,
    limits: division.RowLimits,
    ranks: Ranks,
) -> MemoryParts:
    step_tokens = sizes.step_tokens
    free, total = torch.cuda.mem_get_info(model.device)
    fraction = settings.cache_memory_fraction
    utilization = settings.gpu_memory_utilization
    if utilization is not None:
        fraction = 1.0
    if utilization is not None or sizes.sharing > 1 or settings.memory_share < 1.0:
        own = torch.cuda.memory_reserved(model.device)
        share = (utilization or 1.0) * settings.memory_share / sizes.sharing
        free = division.usable_bytes(free, total, own, share)
    free = ranks.least(free)
    wanted = division.cache_tokens(settings.cache_tokens, settings.cache_bytes, sequence)
    rows, bound = division.gpu_rows(free, sequence, step_tokens, fraction, wanted, limits)
    budget = division.gpu_budget(free, rows, sequence, step_tokens, fraction)
    copy_bytes = model.compress_weights(division.copy_budget(budget, sequence, wanted))
    if copy_bytes:
        torch.cuda.empty_cache()  # memory that packing took temporarily
    blocks = division.gpu_blocks(budget - copy_bytes, sequence, rows, settings.reuse, wanted)
    return MemoryParts(rows, ranks.least(blocks), copy_bytes, bound)
