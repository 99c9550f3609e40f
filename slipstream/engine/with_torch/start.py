"""Creates a model of torch and its runner, on a GPU or a CPU, and divides the memory of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.engine.loop import Progress, warm_up
from slipstream.engine.memory import division
from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.placement import cpu_threads, place_rank
from slipstream.engine.settings import EngineSettings
from slipstream.engine.sizes import (
    BuiltLimits,
    EngineSizes,
    MemoryParts,
    PreparedModel,
    WarmRunner,
    divide_cpu_memory,
    sequence_sizes,
)
from slipstream.engine.with_torch.runner import Runner
from slipstream.kernels import packed_cache
from slipstream.kernels.options import KernelOptions
from slipstream.kernels.ranks import Ranks
from slipstream.model.position import rotary_size
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Transformer
from slipstream.version import VERSION

if TYPE_CHECKING:
    from slipstream.kernels.gpu.compilation.pool import CompilePool


def prepare_model(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    sizes: EngineSizes,
    limits: BuiltLimits,
    progress: Progress,
    compiler: CompilePool | None,
    ranks: Ranks,
) -> PreparedModel:
    """Create the model, its memory and the warm runner. `tensors` is emptied."""
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if not sizes.on_gpu:
        torch.set_num_threads(cpu_threads(settings, usable_cores(), ranks.local_size))
    model = _create_model(spec, tensors, settings, sizes, limits.fp8_cache, ranks)
    parts = divide_memory(model, settings, sizes, limits.rows, ranks)
    warm = _prepare_runner(model, settings.block_tokens, sizes, parts, progress, compiler, ranks)
    rules = [layer.rule for layer in model.layers]
    return PreparedModel(rules, parts, warm, weight_bytes, _describe_cache(warm.runner.cache.dtype))


def _describe_cache(dtype: object) -> str:
    """Return the name of a type of torch."""
    names: dict[object, str] = {
        packed_cache.DTYPE: "bfloat16 in 12 bits",
        torch.float8_e4m3fn: "fp8",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))


def describe_machine(sizes: EngineSizes) -> str:
    """Return what must be the same on all ranks, so that they compute the same bits."""
    device = "a CPU"
    if sizes.on_gpu:
        device = torch.cuda.get_device_name(sizes.device)
    return f"slipstream {VERSION}, torch {torch.__version__}, {device}, {sizes.dtype}"


def _create_model(
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    settings: EngineSettings,
    sizes: EngineSizes,
    fp8_cache: bool,
    ranks: Ranks,
) -> Transformer:
    fp8_cache = fp8_cache or settings.cache_dtype == "fp8"
    options = settings.kernel_options
    device = torch.device(sizes.device)
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    cached = cache_dtype(spec, dtype, device, settings.block_tokens, fp8_cache, options)
    model = Transformer(spec, tensors, dtype, device, sizes.longest, cached, options, ranks)
    # A wider window covers every sequence.
    if min(settings.attention_windows, default=sizes.longest) < sizes.longest:
        model.set_attention_windows(settings.attention_windows, settings.sink_tokens)
    tensors.clear()  # the model has copied what it lays out in another way
    return model


def cache_dtype(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
    fp8_cache: bool,
    options: KernelOptions = KernelOptions(),
) -> torch.dtype:
    """Return the type of cached keys and values."""
    all_rotate = all(map(spec.rotates_layer, range(spec.layers)))
    rotated = rotary_size(spec) if all_rotate else 0
    return packed_cache.kv_cache_dtype(
        dtype, device, spec.head_size, rotated, block_tokens, fp8_cache, options
    )


def _prepare_runner(
    model: Transformer,
    block_tokens: int,
    sizes: EngineSizes,
    parts: MemoryParts,
    progress: Progress,
    compiler: CompilePool | None,
    ranks: Ranks,
) -> WarmRunner:
    """Create the runner of this device and warm it up."""
    if sizes.on_gpu:
        # needs Triton, which a CPU installation lacks
        from slipstream.engine.gpu.runner import GpuRunner
        from slipstream.engine.gpu.warm_up import GpuWarmUp

        gpu_runner = GpuRunner(model, parts.blocks, block_tokens, parts.rows, sizes.longest)
        steps = GpuWarmUp(
            gpu_runner, parts.rows, sizes.step_tokens, sizes.longest, parts.blocks, ranks
        )
        steps.compile_kernels(compiler, progress)
        return WarmRunner(gpu_runner, *steps.run(progress))
    runner = Runner(model, parts.blocks, block_tokens, parts.rows, sizes.longest)
    warm_up(runner, model.spec.vocab_size, parts.blocks, sizes.longest)
    return WarmRunner(runner)


def place(settings: EngineSettings, ranks: Ranks) -> tuple[str, int]:
    """Return the device of this rank and how many processes are on it."""
    device = find_device(settings)
    if not device.startswith("cuda"):
        return device, settings.replicas * ranks.local_size
    gpus = torch.cuda.device_count()
    placement = place_rank(settings, ranks.local_rank, ranks.local_size, gpus)
    if placement.device is None:
        return device, placement.sharing
    torch.cuda.set_device(placement.device)  # Triton launches kernels on the current device
    return f"cuda:{placement.device}", placement.sharing


def find_device(settings: EngineSettings) -> str:
    nvidia = torch.version.hip is None  # torch calls AMD's GPUs cuda, too
    if settings.device == "auto":
        return "cuda" if nvidia and torch.cuda.is_available() else "cpu"
    if settings.device.startswith("cuda") and not nvidia:
        raise ValueError(
            "device: this torch is for AMD's GPUs, the kernels are for NVIDIA's; use the device cpu"
        )
    return str(torch.device(settings.device))


def divide_memory(
    model: Transformer,
    settings: EngineSettings,
    sizes: EngineSizes,
    most_rows: int | None,
    ranks: Ranks,
) -> MemoryParts:
    """Divide the memory that the weights leave free, and make 12-bit copies of weights.

    All ranks have as many rows and blocks as the one with the least memory.
    """
    sequence = sequence_sizes(model.cached_bytes, model.spec.vocab_size, settings, sizes)
    if not sizes.on_gpu:
        return divide_cpu_memory(sequence, settings, sizes, most_rows, ranks)
    limits = division.RowLimits(settings.max_rows, most_rows)
    return _divide_gpu_memory(model, settings, sizes, sequence, limits, ranks)


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
