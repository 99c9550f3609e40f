"""Creates an engine from weights and settings: divides the memory and runs everything once.

This module needs no torch. Models of torch, on a GPU or a CPU, come from `with_torch/start.py`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.adapters.loader import (
    AdapterSizes,
    ReadFolder,
    create_adapters,
    create_store,
)
from slipstream.engine.adapters.store import AdapterStore
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.window import Window
from slipstream.engine.loop import EngineLoop, Progress, StepRunner
from slipstream.engine.memory import division
from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.placement import cpu_threads
from slipstream.engine.messages import EngineInfo
from slipstream.engine.ranks.following import Follower
from slipstream.engine.ranks.leading import LeadingRunner
from slipstream.engine.ranks.orders import Followers
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.settings import EngineSettings
from slipstream.engine.sizes import (
    BuiltLimits,
    EngineSizes,
    PreparedModel,
    WarmRunner,
    choose_sizes,
    divide_cpu_memory,
    sequence_sizes,
)
from slipstream.engine.speculation import Speculation
from slipstream.engine.step_budget import PromptLimits, PromptSpread, StepBudget
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.kernels.stored import Weight, bytes_of
from slipstream.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.engine.cpu.packed_file import PackedFile
    from slipstream.kernels.gpu.compilation.pool import CompilePool


logger = logging.getLogger(__name__)

# One thread for the masks of guided requests: the matchers of a grammar share a lock, and a thread
# that waits for it stops all others. On a CPU it would take a core from the model.
_REVISION_THREADS = 1

# The logits of prompts with scores grow with the prompt, and so do the memory and the time of a
# step that has them: other requests wait for it. A step that does not fit into memory ends an
# engine of several ranks. So these prompts advance by this many tokens a step.
_SCORED_TOKENS = 256
_SCORED_TOKENS_ON_CPU = 64


class Weights(Protocol):
    """The weights of an engine, or of one rank's part of it."""

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        """Return them as tensors of torch. Blocks are expanded to a type such as "bfloat16"."""
        ...

    def arrays(self) -> dict[str, Weight]:
        """Return them as stored, as arrays of numpy."""
        ...

    def packed_file(self, dtype: str) -> PackedFile | None:
        """Return the file that keeps them packed for compiled code; None: there is none."""
        ...


class TensorsInMemory:
    """Weights that are tensors of torch already."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        return self._tensors

    def arrays(self) -> dict[str, Weight]:
        from slipstream.engine.with_torch.arrays import to_arrays

        return to_arrays(self._tensors)

    def packed_file(self, dtype: str) -> PackedFile | None:
        return None


class RankGroup(NamedTuple):
    """The ranks of an engine, as the leading one sees them."""

    ranks: Ranks
    whole_spec: ModelSpec
    followers: Followers


def create_engine(
    spec: ModelSpec,
    weights: Weights | dict[str, Tensor],
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
    """Create an engine from weights. For an engine folder, see `weights.load.start_engine`.

    weights: tensors of torch are emptied.
    longest_sequence: prompt + output that the engine folder allows.
    most_step_tokens: tokens per step that the engine folder allows, unless the settings say more.
    most_rows: rows that the engine folder allows, unless the settings say more.
    read_adapter: reads the folders of adapters; without it, adapters come with requests only.
    fp8_cache: keep keys and values in 8 bits, if the device has instructions for that.
    compiler: processes that compile the kernels of a GPU; None: they compile when first launched.
    group: the other ranks; spec and weights are then those of this rank, the leading one.
    code_folder: where compiled code for a CPU is kept; None: it is compiled in memory.
    """
    began = time.monotonic()
    settings = settings_of_model(spec, settings)
    ranks = ALONE if group is None else group.ranks
    limits = BuiltLimits(longest_sequence, most_step_tokens, most_rows, fp8_cache)
    if isinstance(weights, dict):
        weights = TensorsInMemory(weights)
    prepared = _prepare(spec, weights, settings, limits, progress, compiler, ranks, code_folder)
    runner = prepared.runner
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
    info = _describe(scheduler, settings, prepared, ranks.size, loaded)
    return EngineLoop(scheduler, runner, info, prepared.sizes.depth, adapters, leader)


def create_follower(
    spec: ModelSpec,
    weights: Weights,
    settings: EngineSettings,
    limits: BuiltLimits,
    ranks: Ranks,
    code_folder: Path | None = None,
) -> Follower:
    """Create a following rank from its part of the weights."""
    settings = settings_of_model(spec, settings)
    prepared = _prepare(spec, weights, settings, limits, _no_progress, None, ranks, code_folder)
    return Follower(prepared.runner, prepared.store)


def settings_of_model(spec: ModelSpec, settings: EngineSettings) -> EngineSettings:
    """Return the settings that a model allows. Where attention goes in both directions, a prompt is
    computed in one step, without cached blocks of others.
    """
    if spec.causal:
        return settings
    if settings.kernel_options.deterministic:
        raise ValueError(
            f"deterministic: {spec.architecture}, whose attention goes in both directions, has no "
            "such form; remove the option"
        )
    return replace(settings, chunked=False, reuse=False, target_itl_ms=None)


def _no_progress(phase: str, done: int, total: int) -> None:
    """The leading rank shows the progress of all."""


class _Prepared(NamedTuple):
    """The parts that every rank has."""

    spec: ModelSpec
    sizes: EngineSizes
    model: PreparedModel
    host_slots: int  # of evicted blocks
    store: AdapterStore
    adapter_sizes: AdapterSizes

    @property
    def runner(self) -> StepRunner:
        return self.model.warm.runner


def _prepare(
    spec: ModelSpec,
    weights: Weights,
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
    device, sharing = _place(settings, ranks)
    sizes = choose_sizes(settings, limits, device, sharing)
    if ranks.size > 1:
        from slipstream.engine.with_torch.start import describe_machine

        ranks.meet(describe_machine(sizes))
    model = None
    if not sizes.on_gpu:
        model = _prepare_compiled(
            spec, weights, settings, sizes, limits, progress, ranks, code_folder
        )
    if model is None:
        from slipstream.engine.with_torch.start import prepare_model

        tensors = weights.tensors(sizes.dtype)
        model = prepare_model(spec, tensors, settings, sizes, limits, progress, compiler, ranks)
    parts = model.parts
    slots = _add_host_cache(model.warm.runner, settings, parts.blocks, ranks)
    store, adapter_sizes = create_store(
        spec, settings, parts.rows, sizes.dtype, sizes.device, ranks
    )
    return _Prepared(spec, sizes, model, slots, store, adapter_sizes)


def _place(settings: EngineSettings, ranks: Ranks) -> tuple[str, int]:
    """Return the device of this rank and how many processes are on it."""
    if settings.device == "cpu":
        return "cpu", settings.replicas * ranks.local_size
    from slipstream.engine.with_torch.start import place

    return place(settings, ranks)


def _prepare_compiled(
    spec: ModelSpec,
    weights: Weights,
    settings: EngineSettings,
    sizes: EngineSizes,
    limits: BuiltLimits,
    progress: Progress,
    ranks: Ranks,
    code_folder: Path | None,
) -> PreparedModel | None:
    """Create the model and the runner of compiled code for a CPU; None where torch computes."""
    from slipstream.engine.cpu.create import create_runner
    from slipstream.engine.cpu.model import CpuModel
    from slipstream.engine.cpu.path import choose_path

    path = choose_path(spec, settings.cpu_code, sizes.dtype)
    if path.reason and ranks.rank == 0:  # all ranks decide alike
        logger.info("torch computes this model on the CPU: %s", path.reason)
    ranks.meet("torch" if path.level is None else f"compiled code {path.level.name}")
    if path.level is None:
        return None
    arrays = weights.arrays()
    weight_bytes = sum(bytes_of(weight) for weight in arrays.values())
    exact = settings.exact_activations
    packed = weights.packed_file(sizes.dtype)
    model = CpuModel(
        spec, arrays, sizes.dtype, sizes.longest, settings.kernel_options, exact, packed, ranks
    )
    # A wider window covers every sequence.
    if min(settings.attention_windows, default=sizes.longest) < sizes.longest:
        model.set_attention_windows(settings.attention_windows, settings.sink_tokens)
    sequence = sequence_sizes(model.cached_bytes, spec.vocab_size, settings, sizes)
    parts = divide_cpu_memory(sequence, settings, sizes, limits.rows, ranks)
    threads = cpu_threads(settings, usable_cores(), ranks.local_size)
    shape = (parts.blocks, settings.block_tokens, parts.rows, sizes.longest)
    runner = create_runner(model, path, threads, *shape, code_folder, progress)
    rules = [layer.rule for layer in model.layers]
    return PreparedModel(rules, parts, WarmRunner(runner), weight_bytes, sizes.dtype)


def _describe(
    scheduler: Scheduler,
    settings: EngineSettings,
    prepared: _Prepared,
    ranks: int,
    load_seconds: float,
) -> EngineInfo:
    sizes = prepared.sizes
    model = prepared.model
    parts = model.parts
    return EngineInfo(
        vocab_size=scheduler.vocab_size,
        max_sequence_tokens=sizes.longest,
        max_rows=parts.rows,
        total_blocks=parts.blocks,
        block_tokens=settings.block_tokens,
        device=sizes.device,
        dtype=sizes.dtype,
        weight_bytes=model.weight_bytes,
        cache_bytes=model.warm.runner.cache.nbytes,
        load_seconds=load_seconds,
        step_bytes=model.warm.step_bytes,
        graph_bytes=model.warm.graph_bytes,
        compressed_weight_bytes=parts.copy_bytes,
        max_beam_width=scheduler.capacity.beam_width,
        windowed=scheduler.window is not None,
        step_tokens=sizes.step_tokens,
        rows_bound=parts.rows_bound,
        cache_dtype=model.cache_dtype,
        reuse=settings.reuse,
        ranks=ranks,
    )


def _add_host_cache(runner: StepRunner, settings: EngineSettings, blocks: int, ranks: Ranks) -> int:
    """Add host memory for evicted blocks to the runner; return how many fit. The ranks share it."""
    own_bytes = settings.host_cache_bytes // ranks.size
    slots = ranks.least(division.host_slots(own_bytes, runner.cache.nbytes, blocks))
    if slots and settings.reuse:
        from slipstream.engine.cache.host_cache import HostCache

        runner.host = HostCache(runner.cache, slots, settings.block_tokens)
    return slots


def _create_scheduler(
    prepared: _Prepared, settings: EngineSettings, adapters: AdapterCache
) -> Scheduler:
    sizes = prepared.sizes
    model = prepared.model
    limits = _prompt_limits(settings, sizes.step_tokens, model.warm.tokens_per_second)
    if settings.chunked:  # otherwise a prompt is computed in one step, whatever it needs
        on_gpu = max(_SCORED_TOKENS, model.parts.rows)
        limits.most_scored = on_gpu if sizes.on_gpu else _SCORED_TOKENS_ON_CPU
    pool = BlockPool(model.parts.blocks, settings.block_tokens, settings.reuse, prepared.host_slots)
    return Scheduler(
        pool,
        model.parts.rows,
        sizes.step_tokens,
        sizes.longest,
        prepared.spec.vocab_size,
        settings.policy,
        settings.chunked,
        max_beam_width=settings.max_beam_width,
        speculation=Speculation(
            settings.lookup_tokens, settings.adaptive_lookup and not sizes.on_gpu
        ),
        adapters=adapters,
        window=Window.from_rules(model.rules, sizes.longest),
        revision_threads=_REVISION_THREADS if sizes.on_gpu else 0,
        prompt_limits=limits,
    )


def _prompt_limits(
    settings: EngineSettings, step_tokens: int, tokens_per_second: float
) -> PromptLimits:
    target = None
    if settings.target_itl_ms is not None:
        target = StepBudget(settings.target_itl_ms / 1000, step_tokens)
    return PromptLimits(target, PromptSpread(tokens_per_second) if tokens_per_second else None)
