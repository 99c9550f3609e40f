"""Creates an engine from weights and settings: divides the memory and runs everything once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slipstream.engine import memory
from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.adapters.loader import ReadFolder, create_adapters
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.host_cache import HostCache
from slipstream.engine.cache.window import Window
from slipstream.engine.loop import EngineLoop, StepRunner
from slipstream.engine.messages import EngineInfo
from slipstream.engine.request import GenerateRequest
from slipstream.engine.runner import Runner
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.settings import EngineSettings
from slipstream.kernels import packed_cache
from slipstream.kernels.options import KernelOptions
from slipstream.model.position import rotary_size
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Transformer

if TYPE_CHECKING:
    from slipstream.engine.gpu.runner import GpuRunner

# A CPU computes about this many prompt tokens before other requests notice the delay.
_CPU_STEP_TOKENS = 512
# Enough to keep a GPU's tensor cores busy; more only delays other requests.
_GPU_STEP_TOKENS = 8192
_WARM_UP_REQUEST = -1
# tokens of each prompt in a warm-up step with the full budget; more where there are few rows
_WARM_UP_TOKENS = 1024

Progress = Callable[[int, int], None]

# One thread for the masks of guided requests: the matchers of a grammar share a lock, and a thread
# that waits for it stops all others. On a CPU it would take a core from the model.
_REVISION_THREADS = 1


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine that do not depend on its memory."""

    device: torch.device
    dtype: torch.dtype
    longest: int  # tokens of the longest sequence
    step_tokens: int  # token budget of one step


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
    """Create an engine from weights in memory. `tensors` is emptied.

    `weights.load.start_engine` reads an engine folder from disk and then calls this function.

    longest_sequence: prompt + output that the engine folder allows.
    most_step_tokens: tokens per step that the engine folder allows, unless the settings say more.
    read_adapter: reads the folders of adapters; without it, adapters come with requests only.
    fp8_cache: keep keys and values in 8 bits, if the device has instructions for that.
    """
    began = time.monotonic()
    sizes = _choose_sizes(settings, longest_sequence, most_step_tokens)
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    model = _create_model(spec, tensors, settings, sizes, fp8_cache)
    copy_bytes, blocks = _divide_memory(model, settings, sizes.longest)
    prepared = _prepare_runner(model, settings, sizes, blocks, progress)
    runner = prepared.runner
    slots = _add_host_cache(runner, settings, blocks)
    pool = BlockPool(blocks, settings.block_tokens, settings.reuse, slots)
    adapters = create_adapters(spec, settings, sizes.dtype, sizes.device, read_adapter)
    scheduler = _create_scheduler(model, settings, sizes, pool, adapters.cache)
    info = EngineInfo(
        vocab_size=spec.vocab_size,
        max_sequence_tokens=sizes.longest,
        max_rows=settings.max_rows,
        total_blocks=blocks,
        block_tokens=settings.block_tokens,
        device=str(sizes.device),
        dtype=str(sizes.dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        cache_bytes=runner.cache.nbytes,
        load_seconds=time.monotonic() - began,
        step_bytes=prepared.step_bytes,
        graph_bytes=prepared.graph_bytes,
        compressed_weight_bytes=copy_bytes,
        max_beam_width=scheduler.capacity.beam_width,
        windowed=scheduler.window is not None,
    )
    overlaps = sizes.device.type == "cuda" and settings.overlap
    return EngineLoop(scheduler, runner, info, depth=2 if overlaps else 1, adapters=adapters)


def _choose_sizes(
    settings: EngineSettings, longest_sequence: int, most_step_tokens: int | None
) -> EngineSizes:
    device = _device(settings)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(settings.threads or usable_cores())
    usual = _GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS
    return EngineSizes(
        device=device,
        dtype=getattr(torch, _dtype_name(settings.dtype, on_gpu)),
        longest=min(longest_sequence, settings.max_sequence_tokens or longest_sequence),
        step_tokens=settings.step_tokens or min(usual, most_step_tokens or usual),
    )


def _create_model(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    sizes: EngineSizes,
    fp8_cache: bool,
) -> Transformer:
    options = settings.kernel_options
    cache_dtype = _cache_dtype(
        spec, sizes.dtype, sizes.device, settings.block_tokens, fp8_cache, options
    )
    model = Transformer(
        spec, tensors, sizes.dtype, sizes.device, sizes.longest, cache_dtype, options
    )
    # A wider window covers every sequence.
    if min(settings.attention_windows, default=sizes.longest) < sizes.longest:
        model.set_attention_windows(settings.attention_windows, settings.sink_tokens)
    tensors.clear()  # the model has copied what it lays out in another way
    return model


class _Prepared(NamedTuple):
    runner: StepRunner
    step_bytes: int = 0  # GPU memory that a step with the full budget takes
    graph_bytes: int = 0  # GPU memory of captured steps


def _prepare_runner(
    model: Transformer,
    settings: EngineSettings,
    sizes: EngineSizes,
    blocks: int,
    progress: Progress,
) -> _Prepared:
    """Create the runner of this device and warm it up."""
    if model.device.type == "cuda":
        # needs Triton, which a CPU installation lacks
        from slipstream.engine.gpu.runner import GpuRunner

        gpu_runner = GpuRunner(
            model, blocks, settings.block_tokens, settings.max_rows, sizes.longest
        )
        return _prepare_gpu(gpu_runner, settings.max_rows, sizes, blocks, progress)
    runner = Runner(model, blocks, settings.block_tokens, settings.max_rows, sizes.longest)
    warm_up(model.spec, runner, blocks, sizes.longest)
    return _Prepared(runner)


def _add_host_cache(runner: StepRunner, settings: EngineSettings, blocks: int) -> int:
    """Add host memory for evicted blocks to the runner; return how many fit."""
    slots = memory.host_slots(settings.host_cache_bytes, runner.cache.nbytes, blocks)
    if slots and settings.reuse:
        runner.host = HostCache(runner.cache, slots, settings.block_tokens)
    return slots


def _create_scheduler(
    model: Transformer,
    settings: EngineSettings,
    sizes: EngineSizes,
    pool: BlockPool,
    adapters: AdapterCache,
) -> Scheduler:
    return Scheduler(
        pool,
        settings.max_rows,
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
    )


def warm_up(
    spec: ModelSpec,
    runner: StepRunner,
    total_blocks: int,
    longest: int,
    tokens: int = 16,
    requests: int = 1,
    steps: int = 1,
) -> None:
    """Run requests of `tokens` tokens through the runner, so that users do not wait for its first
    calls.

    steps: the number of steps that the prompt of a single request takes.
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
    runner: GpuRunner, max_rows: int, sizes: EngineSizes, blocks: int, progress: Progress
) -> _Prepared:
    """Compile kernels, run a step with the full budget and capture CUDA graphs."""
    from slipstream.engine.gpu.graphs import batch_sizes  # these need Triton
    from slipstream.engine.gpu.mixed_graphs import MAX_PREFILLS
    from slipstream.kernels.gpu.prefill_tiles import LARGE_TILES_FROM

    spec = runner.model.spec
    longest = sizes.longest
    budget = sizes.step_tokens
    runner.model.prepare_gates()
    warm_up(spec, runner, blocks, longest)
    each = max(1, min(longest - 2, budget, max(_WARM_UP_TOKENS, -(-budget // max_rows))))
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    warm_up(spec, runner, blocks, longest, each, max(1, min(budget // each, max_rows)))
    step_bytes = torch.cuda.max_memory_allocated() - held
    # Long prompts, and prompts of several steps, have kernels of their own. They are compiled now,
    # because a compilation delays all requests.
    for tokens in (
        (_WARM_UP_TOKENS, LARGE_TILES_FROM)
        if longest - 2 >= LARGE_TILES_FROM
        else (_WARM_UP_TOKENS,)
    ):
        warm_up(spec, runner, blocks, longest, tokens)
        warm_up(spec, runner, blocks, longest, tokens, steps=2)
    free, _ = torch.cuda.mem_get_info()
    runner.capture(max_rows, progress)
    # The library loads its kernels when they are first used. Steps with fewer prompts are captured.
    for prompts in (size for size in batch_sizes(max_rows) if MAX_PREFILLS < size <= blocks):
        warm_up(spec, runner, blocks, longest, 2, prompts)
    graph_bytes = max(0, free - torch.cuda.mem_get_info()[0])
    return _Prepared(runner, step_bytes, graph_bytes)


def usable_cores() -> int:
    """Return the number of cores that this process may use; fewer than the machine's in a
    container.
    """
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
        # On a CPU the caller, which can probe the machine safely, chooses bfloat16.
        return "bfloat16" if on_gpu else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return dtype


def _divide_memory(model: Transformer, settings: EngineSettings, longest: int) -> tuple[int, int]:
    """Divide the memory that the weights leave free, and make 12-bit copies of weights.

    Returns the bytes of the copies and the number of blocks of the cache.
    """
    size = settings.block_tokens
    block_bytes = model.cached_bytes * size
    if model.device.type != "cuda":
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return 0, memory.cpu_blocks(
            machine_bytes, block_bytes, size, longest, settings.cache_tokens
        )
    free, _ = torch.cuda.mem_get_info(model.device)
    budget = memory.gpu_budget(
        free, settings.max_rows, model.spec.vocab_size, longest, settings.cache_memory_fraction
    )
    copy_bytes = model.compress_weights(
        memory.copy_budget(budget, block_bytes, size, longest, settings.cache_tokens)
    )
    if copy_bytes:
        torch.cuda.empty_cache()  # memory that packing took temporarily
    blocks = memory.gpu_blocks(
        budget - copy_bytes, block_bytes, size, longest, settings.max_rows, settings.cache_tokens
    )
    return copy_bytes, blocks
