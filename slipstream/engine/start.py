"""From weights and settings to an engine that can serve: memory sized, everything touched once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slipstream.engine.adapters.adapters import Adapters
from slipstream.engine.adapters.loader import ReadFolder, create_adapters
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.host_cache import HostCache
from slipstream.engine.cache.window import Window
from slipstream.engine.loop import AnyRunner, EngineLoop
from slipstream.engine.messages import EngineInfo
from slipstream.engine.request import GenerateRequest, SamplingParams
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.settings import EngineSettings
from slipstream.kernels import packed_cache
from slipstream.kernels.options import KernelOptions
from slipstream.model.position import rotary_size
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Transformer

if TYPE_CHECKING:
    from slipstream.engine.gpu.runner import GpuRunner

# A CPU computes about this many prompt tokens before the requests beside them notice the wait.
_CPU_STEP_TOKENS = 512
# Enough for a GPU's matrix units to be busy; more only makes the requests beside a prompt wait.
_GPU_STEP_TOKENS = 8192
# A CPU machine's memory is shared with everything else on it; this much cache serves 16 long chats.
_CPU_CACHE_BYTES = 512 * 2**20
# What graphs, libraries' workspaces and the activations of a full step take beside weights and
# cache.
_GPU_SPARE_BYTES = 6 * 2**30
# Of the cache's memory, the share that copies of weights may take: less cache, faster steps of few
# tokens.
_COPY_SHARE = 1 / 6
_WARM_UP_REQUEST = -1
# of each prompt in a step that fills the budget; more where the rows are few
_WARM_UP_TOKENS = 1024

Progress = Callable[[int, int], None]


def create_engine(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    longest_sequence: int,
    progress: Progress = lambda done, total: None,
    read_adapter: ReadFolder | None = None,
    fp8_cache: bool = False,
    most_step_tokens: int | None = None,
) -> EngineLoop:
    """An engine over these weights. `longest_sequence`: what the engine folder allows, prompt and
    output. `most_step_tokens`: what it allows a step, where the settings do not say.

    `read_adapter` reads the folders of adapters; without it, adapters come with requests only.
    `fp8_cache` keeps keys and values in eight bits; a device that has no instructions for that
    keeps them as if they were not asked for.
    """
    began = time.monotonic()
    device = _device(settings)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(settings.threads or usable_cores())
    dtype = getattr(torch, _dtype_name(settings.dtype, on_gpu))
    longest = min(longest_sequence, settings.max_sequence_tokens or longest_sequence)
    usual = _GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS
    step_tokens = settings.step_tokens or min(usual, most_step_tokens or usual)
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    cache_dtype = _cache_dtype(spec, dtype, device, settings.block_tokens, fp8_cache)
    model = Transformer(spec, tensors, dtype, device, longest, cache_dtype)
    # otherwise all is in sight anyway
    if min(settings.attention_windows, default=longest) < longest:
        model.set_attention_windows(settings.attention_windows, settings.sink_tokens)
    tensors.clear()  # what was laid out anew need not be held twice
    copy_bytes, blocks = _share_out_memory(model, settings, longest)
    runner, step_bytes, graph_bytes = _prepare_runner(
        model, settings, blocks, longest, step_tokens, progress
    )
    pool = BlockPool(
        blocks, settings.block_tokens, settings.reuse, _add_host_cache(runner, settings, blocks)
    )
    adapters = create_adapters(spec, settings, dtype, device, read_adapter)
    scheduler = _scheduler(model, settings, pool, longest, step_tokens, adapters.adapters)
    info = EngineInfo(
        vocab_size=spec.vocab_size,
        max_sequence_tokens=longest,
        max_rows=settings.max_rows,
        total_blocks=blocks,
        block_tokens=settings.block_tokens,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        cache_bytes=runner.cache.nbytes,
        load_seconds=time.monotonic() - began,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        copy_bytes=copy_bytes,
        max_beam_width=scheduler.capacity.beam_width,
        windowed=scheduler.window is not None,
    )
    return EngineLoop(
        scheduler, runner, info, depth=2 if on_gpu and settings.overlap else 1, adapters=adapters
    )


class _Prepared(NamedTuple):
    runner: AnyRunner
    step_bytes: int = 0  # what a step of the full budget takes of a GPU's memory
    graph_bytes: int = 0  # and what its captured steps do


def _prepare_runner(
    model: Transformer,
    settings: EngineSettings,
    blocks: int,
    longest: int,
    step_tokens: int,
    progress: Progress,
) -> _Prepared:
    """What carries plans out on this device, warmed up."""
    sizes = (blocks, settings.block_tokens, settings.max_rows, longest)
    if model.device.type == "cuda":
        # needs Triton, which a CPU installation lacks
        from slipstream.engine.gpu.runner import GpuRunner

        gpu_runner = GpuRunner(model, *sizes)
        taken = _prepare_gpu(
            gpu_runner, model.spec, settings.max_rows, longest, blocks, step_tokens, progress
        )
        return _Prepared(gpu_runner, *taken)
    runner = Runner(model, *sizes)
    warm_up(model.spec, runner, blocks, longest)
    return _Prepared(runner)


def _add_host_cache(runner: AnyRunner, settings: EngineSettings, blocks: int) -> int:
    """Room in the host's memory for blocks → how many of them, as far as settings give bytes for
    it.
    """
    slots = settings.host_cache_bytes // (runner.cache.nbytes // (blocks + 1))
    if slots and settings.reuse:
        runner.host = HostCache(runner.cache, slots, settings.block_tokens)
    return slots


def _scheduler(
    model: Transformer,
    settings: EngineSettings,
    pool: BlockPool,
    longest: int,
    step_tokens: int,
    adapters: Adapters,
) -> Scheduler:
    return Scheduler(
        pool,
        settings.max_rows,
        step_tokens,
        longest,
        model.spec.vocab_size,
        settings.policy,
        settings.chunked,
        max_beam_width=settings.max_beam_width,
        lookup_tokens=settings.lookup_tokens,
        adapters=adapters,
        window=Window.of((layer.rule for layer in model.layers), longest),
    )


def warm_up(
    spec: ModelSpec,
    runner: AnyRunner,
    total_blocks: int,
    longest: int,
    tokens: int = 16,
    requests: int = 1,
    steps: int = 1,
) -> None:
    """Run requests through the runner alone, so that the first user does not pay for first calls.
    steps: that the prompt of a single request takes.
    """
    pool = BlockPool(total_blocks, runner.block_tokens, reuse=False)
    tokens = min(tokens, longest - 2, total_blocks * runner.block_tokens // requests - 2)
    budget = requests * longest if steps == 1 else max(1, -(-tokens // steps))
    scheduler = Scheduler(pool, requests, budget, longest, spec.vocab_size)
    for number in range(requests):
        scheduler.add(
            GenerateRequest(_WARM_UP_REQUEST - number, [0] * tokens, SamplingParams(max_tokens=2))
        )
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, runner.launch(plan).result())


def _prepare_gpu(
    runner: GpuRunner,
    spec: ModelSpec,
    max_rows: int,
    longest: int,
    blocks: int,
    budget: int,
    progress: Progress,
) -> tuple[int, int]:
    """Compile kernels, run a step of the full budget, capture decode steps → bytes of that step, of
    the graphs.
    """
    from slipstream.engine.gpu.graphs import ladder  # these need Triton
    from slipstream.engine.gpu.mixed_graphs import PROMPTS
    from slipstream.kernels.gpu.prefill_tiles import LARGE_TILES_FROM

    runner.model.prepare_gates()
    warm_up(spec, runner, blocks, longest)
    each = max(1, min(longest - 2, budget, max(_WARM_UP_TOKENS, -(-budget // max_rows))))
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    warm_up(spec, runner, blocks, longest, each, max(1, min(budget // each, max_rows)))
    step_bytes = torch.cuda.max_memory_allocated() - held
    # Long prompts, and those of several steps, have kernels of their own, not to be compiled while
    # others wait.
    for tokens in (
        (_WARM_UP_TOKENS, LARGE_TILES_FROM)
        if longest - 2 >= LARGE_TILES_FROM
        else (_WARM_UP_TOKENS,)
    ):
        warm_up(spec, runner, blocks, longest, tokens)
        warm_up(spec, runner, blocks, longest, tokens, steps=2)
    free, _ = torch.cuda.mem_get_info()
    runner.capture(max_rows, progress)
    # The library loads its kernels when first used: let that be now. Fewer prompts are a captured
    # step.
    for prompts in (size for size in ladder(max_rows) if PROMPTS < size <= blocks):
        warm_up(spec, runner, blocks, longest, 2, prompts)
    return step_bytes, max(0, free - torch.cuda.mem_get_info()[0])


def usable_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


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
        # On a CPU the caller, who can probe the machine safely, decides on bfloat16.
        return "bfloat16" if on_gpu else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return dtype


def _share_out_memory(
    model: Transformer, settings: EngineSettings, longest: int
) -> tuple[int, int]:
    """Of what weights leave free → bytes of copies of weights, now made, and blocks of the cache"""
    block_bytes = model.cached_bytes * settings.block_tokens
    if model.device.type != "cuda":
        return 0, _pool_blocks(settings, None, block_bytes, longest)
    room = _gpu_room(model.spec, settings, longest, model.device)
    copy_bytes = model.compress_weights(_copy_room(settings, room, block_bytes, longest))
    if copy_bytes:
        torch.cuda.empty_cache()  # what packing took beside them
    return copy_bytes, _pool_blocks(settings, room - copy_bytes, block_bytes, longest)


def _gpu_room(spec: ModelSpec, settings: EngineSettings, longest: int, device: torch.device) -> int:
    """Bytes of a GPU's memory for the cache, and for what is kept to be faster at its expense."""
    free, _ = torch.cuda.mem_get_info(device)
    # What grows with the rows: logits in float32, those of the graphs and those of a step, and all
    # their tokens.
    beside = settings.max_rows * (2 * spec.vocab_size * 4 + longest * 8)
    return int((free - _GPU_SPARE_BYTES - beside) * settings.cache_memory_fraction)


def _copy_room(settings: EngineSettings, room: int, block_bytes: int, longest: int) -> int:
    """Bytes that copies of weights may take of a GPU: one sequence must still fit. None where the
    size of the cache was given: who reckons with it may have plans for the rest.
    """
    if settings.cache_tokens is not None:
        return 0
    return min(int(room * _COPY_SHARE), room - -(-longest // settings.block_tokens) * block_bytes)


def _pool_blocks(settings: EngineSettings, room: int | None, block_bytes: int, longest: int) -> int:
    """How many blocks the pool has: what was asked for, else as many as a GPU has room for, or a
    CPU's usual cache where that is None; one sequence at least.
    """
    size = settings.block_tokens
    if settings.cache_tokens is not None and room is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // block_bytes
        if settings.cache_tokens > memory * size:
            raise ValueError(
                f"a cache of {settings.cache_tokens} tokens is more than the machine's memory, which "
                f"{memory * size} would fill: lower max_tokens_in_paged_kv_cache"
            )
        return max(1, settings.cache_tokens // size)
    needed = -(-longest // size)
    if room is None:
        return max(_CPU_CACHE_BYTES // block_bytes, needed)
    # more than all rows could fill is of no use
    affordable = min(room // block_bytes, settings.max_rows * needed)
    if settings.cache_tokens is not None and affordable > 0:  # of two limits, the smaller one holds
        return max(1, min(affordable, settings.cache_tokens // size))
    if affordable < needed:
        raise ValueError(
            f"the GPU has room for {max(affordable, 0) * size} cached tokens, one sequence of {longest} needs more: "
            f"lower the longest sequence, or use fewer bits a weight"
        )
    return affordable
