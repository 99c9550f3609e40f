"""The sizes of an engine, and how the memory of a CPU is divided. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.engine.memory import division
from slipstream.engine.memory.host import read_host_memory
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.ranks import Ranks

if TYPE_CHECKING:
    from slipstream.engine.loop import StepRunner

logger = logging.getLogger(__name__)

# A CPU computes about this many prompt tokens before other requests notice the delay.
_CPU_STEP_TOKENS = 512
# Enough to keep a GPU's tensor cores busy; more only delays other requests.
_GPU_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class BuiltLimits:
    """The sizes that an engine folder declares. None: not declared."""

    longest: int  # prompt + output
    step_tokens: int | None = None  # the most tokens of a step, unless the settings say more
    rows: int | None = None  # the most rows, unless the settings say more
    fp8_cache: bool = False  # keys and values in 8 bits, if the device has instructions for that


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine that do not depend on its memory."""

    device: str  # as torch names it: "cpu", "cuda" or "cuda:1"
    dtype: str  # of activations: "float32", "bfloat16" or "float16"
    longest: int  # tokens of the longest sequence
    step_tokens: int  # token budget of one step
    depth: int = 1  # plans in flight
    sharing: int = 1  # processes on the device, this one included, which share its memory

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class MemoryParts(NamedTuple):
    """The division of the device's memory."""

    rows: int  # requests that run at the same time
    blocks: int  # of the KV cache, without the null block
    copy_bytes: int = 0  # 12-bit copies of weights
    rows_bound: division.RowBound = "default"  # what decided the number of rows


class WarmRunner(NamedTuple):
    runner: StepRunner
    step_bytes: int = 0  # GPU memory that a step with the full budget takes
    graph_bytes: int = 0  # GPU memory of captured steps
    tokens_per_second: float = 0.0  # prompt tokens of such a step on a GPU; 0: not measured


class PreparedModel(NamedTuple):
    """A model that is ready to run steps."""

    rules: Iterable[AttentionRule]  # of each layer
    parts: MemoryParts
    warm: WarmRunner
    weight_bytes: int
    cache_dtype: str  # type of cached keys and values, for people


def choose_sizes(
    settings: EngineSettings, limits: BuiltLimits, device: str, sharing: int
) -> EngineSizes:
    on_gpu = device.startswith("cuda")
    usual = _GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS
    longest = min(limits.longest, settings.max_sequence_tokens or limits.longest)
    if settings.max_sequence_tokens is not None and settings.max_sequence_tokens > longest:
        logger.warning(
            "max_seq_len %d is more than this engine was built for: sequences have at most %d "
            "tokens",
            settings.max_sequence_tokens,
            longest,
        )
    step_tokens = settings.step_tokens or min(usual, limits.step_tokens or usual)
    return EngineSizes(
        device=device,
        dtype=_dtype_name(settings.dtype, on_gpu),
        longest=longest,
        # Without chunks a whole prompt must fit one step.
        step_tokens=step_tokens if settings.chunked else max(step_tokens, longest),
        depth=2 if on_gpu and settings.overlap else 1,
        sharing=sharing,
    )


def _dtype_name(dtype: str, on_gpu: bool) -> str:
    if dtype == "auto":
        # On a CPU the caller, which can probe the machine safely, chooses bfloat16.
        return "bfloat16" if on_gpu else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return dtype


def sequence_sizes(
    cached_bytes: int, vocab_size: int, settings: EngineSettings, sizes: EngineSizes
) -> division.SequenceSizes:
    """cached_bytes: of a token in the KV cache"""
    return division.SequenceSizes(
        block_bytes=cached_bytes * settings.block_tokens,
        block_tokens=settings.block_tokens,
        longest=sizes.longest,
        vocab_size=vocab_size,
    )


def divide_cpu_memory(
    sequence: division.SequenceSizes,
    settings: EngineSettings,
    sizes: EngineSizes,
    most_rows: int | None,
    ranks: Ranks,
) -> MemoryParts:
    """Divide the memory that the weights leave free. All ranks have as many rows and blocks as the
    one with the least memory.
    """
    limits = division.RowLimits(settings.max_rows, most_rows)
    host = read_host_memory()
    wanted = division.cache_tokens(settings.cache_tokens, settings.cache_bytes, sequence)
    available = ranks.least(
        division.cpu_share(host, sizes.sharing, wanted is not None, settings.memory_share)
    )
    blocks = division.cpu_blocks(available, sequence, wanted)
    rows, bound = division.cpu_rows(available, sequence, sizes.step_tokens, blocks, limits)
    return MemoryParts(rows, blocks, rows_bound=bound)
