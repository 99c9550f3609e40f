"""How the memory of a machine is divided: pure arithmetic on bytes. No torch here.

GPU memory that the weights leave free
|-- spare --|-- rows --|------ budget ------|-- rest --|
|           |          |                    |          adapters, when first used
|           |          12-bit copies of weights, then the KV cache
|           logits and tokens of each row
activations, CUDA graphs and libraries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from slipstream.engine.memory.host import HostMemory

# The most rows of an engine: the largest batch size that is captured as a CUDA graph.
MAX_ROWS = 4096
# Memory for the activations of a full step, CUDA graphs and the workspaces of libraries, for
# steps of up to _SPARE_STEP_TOKENS tokens.
SPARE_BYTES = 6 * 2**30
_SPARE_STEP_TOKENS = 8192
# The share of the budget that 12-bit copies of weights may take: a smaller cache for faster steps.
_COPY_SHARE = 1 / 6
# Block numbers are Python objects, so a pool has a largest size: 131,072 blocks of 32 tokens.
_MOST_CACHED_TOKENS = 2**22
# A CPU's memory is shared with other processes; this much cache holds 16 long chats.
_CPU_CACHE_BYTES = 512 * 2**20
# The share of a CPU's available memory that the KV cache may take, and the share of the rows.
_CPU_CACHE_SHARE = 1 / 2
_CPU_ROW_SHARE = 1 / 8
# Rows of an engine whose settings and build say nothing. More than these gain no throughput.
_GPU_ROWS = 1024
_CPU_ROWS = 256
# Each row should find this many tokens of KV cache; below _FEWEST_ROWS rows share fewer.
_GPU_TOKENS_PER_ROW = 256
_CPU_TOKENS_PER_ROW = 128
_FEWEST_ROWS = 64


# What decided the number of rows: the settings, the build's max_batch_size, the usual number, the
# tokens of KV cache for each, the tokens of a step, the memory of the rows, or MAX_ROWS.
RowBound = Literal["setting", "build", "default", "cache", "step", "memory", "engine"]


class RowChoice(NamedTuple):
    rows: int
    bound: RowBound


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What the user said about the number of rows. None: nothing."""

    wanted: int | None = None  # this many, if their memory fits
    build: int | None = None  # at most this many: the build's max_batch_size


@dataclass(frozen=True, slots=True)
class SequenceSizes:
    """The sizes of a model that decide how much memory a sequence takes."""

    block_bytes: int  # keys and values of one block
    block_tokens: int
    longest: int  # tokens of the longest sequence
    vocab_size: int

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return blocks_for(self.longest, self.block_tokens)

    @property
    def row_bytes(self) -> int:
        """Memory of a row beside the KV cache: two sets of logits in float32, those of the graphs
        and those of a step, token ids and the block table.
        """
        return 2 * self.vocab_size * 4 + self.longest * 8 + self.blocks * 4


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def cache_tokens(tokens: int | None, cache_bytes: int | None, sizes: SequenceSizes) -> int | None:
    """Return the tokens of a cache whose size is given in tokens or in bytes. None: in neither."""
    if cache_bytes is None:
        return tokens
    return cache_bytes // sizes.block_bytes * sizes.block_tokens


# --- GPU ---


def usable_bytes(free_bytes: int, total_bytes: int, own_bytes: int, utilization: float) -> int:
    """Return the bytes that a process may still take, if it may take a share of the whole GPU.

    `own_bytes`: memory that it has taken, such as that of the weights. Memory of other processes
    does not count, but what they have taken is not free.
    """
    return min(free_bytes, int(total_bytes * utilization) - own_bytes)


def gpu_budget(
    free_bytes: int, rows: int, sizes: SequenceSizes, step_tokens: int, fraction: float
) -> int:
    """Return the bytes of a GPU for the KV cache and 12-bit copies of weights.

    `free_bytes`: memory that the weights leave free. `step_tokens`: token budget of a step.
    `fraction`: the share of the remaining memory to use.
    """
    spare = SPARE_BYTES * max(step_tokens, _SPARE_STEP_TOKENS) // _SPARE_STEP_TOKENS
    return int((free_bytes - spare - rows * sizes.row_bytes) * fraction)


def gpu_rows(
    free_bytes: int,
    sizes: SequenceSizes,
    step_tokens: int,
    fraction: float,
    cache_tokens: int | None,
    limits: RowLimits,
) -> RowChoice:
    """Return the number of rows of a GPU's engine.

    That is the wanted number, or as many as find enough KV cache and tokens of a step. One sequence
    always finds room beside the rows, if there is room for one at all.
    """
    budget = gpu_budget(free_bytes, 0, sizes, step_tokens, fraction)
    row_bytes = sizes.row_bytes * fraction  # the part of the budget that a row takes
    held = 1 if cache_tokens is not None else sizes.blocks  # blocks that must fit
    most = int((budget - held * sizes.block_bytes) // row_bytes)
    per_row = _GPU_TOKENS_PER_ROW * sizes.block_bytes // sizes.block_tokens
    useful = int(budget // (per_row + row_bytes))
    if cache_tokens is not None:
        useful = min(useful, cache_tokens // _GPU_TOKENS_PER_ROW)
    return _choose_rows(limits, useful, step_tokens, _GPU_ROWS, most)


def copy_budget(budget: int, sizes: SequenceSizes, cache_tokens: int | None) -> int:
    """Return the bytes that 12-bit copies of weights may take from the budget.

    One sequence must still fit the cache. A cache of a given size leaves no bytes for copies: the
    user may need the rest of the memory.
    """
    if cache_tokens is not None:
        return 0
    return min(int(budget * _COPY_SHARE), budget - sizes.blocks * sizes.block_bytes)


def gpu_blocks(
    budget: int, sizes: SequenceSizes, rows: int, reuse: bool, cache_tokens: int | None
) -> int:
    """Return the number of blocks of a GPU's cache.

    That is what fits the budget, and no more than `cache_tokens` if it is given. Without reuse, it
    is no more than all rows can fill. Raises ValueError when not even one sequence fits.
    """
    useful = rows * sizes.blocks
    if reuse:  # blocks that no row holds keep the beginnings of earlier prompts
        useful = max(sizes.blocks, _MOST_CACHED_TOKENS // sizes.block_tokens)
    affordable = min(budget // sizes.block_bytes, useful)
    if cache_tokens is not None and affordable > 0:
        return max(1, min(affordable, cache_tokens // sizes.block_tokens))
    if affordable < sizes.blocks:
        raise ValueError(
            f"the GPU has room for {max(affordable, 0) * sizes.block_tokens} cached tokens, one "
            f"sequence of {sizes.longest} needs more: lower the longest sequence, or use fewer "
            "bits a weight"
        )
    return affordable


# --- CPU ---


def cpu_share(host: HostMemory, sharing: int, sized: bool, memory_share: float = 1.0) -> int:
    """Return the bytes that one of `sharing` replicas of a model may take.

    Engines start at the same time, so memory that another one is about to take still counts as
    available. `sized`: the size of each replica's cache is given, and must fit the replica's part
    of the whole memory. memory_share: of the model, if the server has several
    """
    if sized:
        return min(host.available, int(host.total * memory_share) // sharing)
    return int(host.available * memory_share) // sharing


def cpu_blocks(available_bytes: int, sizes: SequenceSizes, cache_tokens: int | None) -> int:
    """Return the number of blocks of a CPU's cache.

    That is `cache_tokens` if it is given, else 512 MiB and at least one sequence, but no more than
    half of the memory that is available now. Raises ValueError when `cache_tokens` need more than
    is available.
    """
    if cache_tokens is None:
        wanted = max(_CPU_CACHE_BYTES // sizes.block_bytes, sizes.blocks)
        return max(1, min(wanted, int(available_bytes * _CPU_CACHE_SHARE) // sizes.block_bytes))
    most_tokens = available_bytes // sizes.block_bytes * sizes.block_tokens
    if cache_tokens > most_tokens:
        raise ValueError(
            f"a KV cache of {cache_tokens} tokens is larger than the available memory, which "
            f"{most_tokens} would fill: lower --kv-cache-memory-bytes or "
            "max_tokens_in_paged_kv_cache"
        )
    return max(1, cache_tokens // sizes.block_tokens)


def cpu_rows(
    available_bytes: int, sizes: SequenceSizes, step_tokens: int, blocks: int, limits: RowLimits
) -> RowChoice:
    """Return the number of rows of a CPU's engine with this many blocks of cache.

    That is the wanted number, or as many as find enough KV cache and tokens of a step. Rows take no
    more than an eighth of the memory that is available now.
    """
    most = int(available_bytes * _CPU_ROW_SHARE) // sizes.row_bytes
    useful = blocks * sizes.block_tokens // _CPU_TOKENS_PER_ROW
    return _choose_rows(limits, useful, step_tokens, _CPU_ROWS, most)


def _choose_rows(
    limits: RowLimits, cached: int, step_tokens: int, usual: int, most: int
) -> RowChoice:
    """Return the wanted rows or the useful ones.

    cached: rows that find enough KV cache
    most: rows whose memory fits
    """
    bounds: list[RowChoice] = []
    if limits.wanted is not None:
        bounds.append(RowChoice(limits.wanted, "setting"))
    else:
        if limits.build is not None:
            bounds.append(RowChoice(limits.build, "build"))
        else:
            bounds.append(RowChoice(usual, "default"))
        bounds.append(RowChoice(max(cached, _FEWEST_ROWS), "cache"))
        bounds.append(RowChoice(max(step_tokens, _FEWEST_ROWS), "step"))
    bounds += [RowChoice(most, "memory"), RowChoice(MAX_ROWS, "engine")]
    lowest = min(bounds, key=lambda choice: choice.rows)
    return RowChoice(max(1, lowest.rows), lowest.bound)


# --- host memory and adapters ---


def host_slots(host_cache_bytes: int, cache_bytes: int, blocks: int) -> int:
    """Return how many blocks fit into `host_cache_bytes` of host memory.

    `cache_bytes`: size of a cache of `blocks` blocks and the null block.
    """
    return host_cache_bytes // (cache_bytes // (blocks + 1))


def adapter_pages(room: int, page_bytes: int, pages_per_adapter: int, max_rows: int) -> int:
    """Return the number of pages for adapters in `room` bytes.

    One adapter of the largest rank always fits. More pages than all rows can use are of no use.
    """
    useful = max_rows * pages_per_adapter
    return max(pages_per_adapter, min(useful, room // page_bytes))
