"""How the memory of a machine is divided: pure arithmetic on bytes. No torch here.

GPU memory that the weights leave free
|-- SPARE_BYTES --|-- per row --|------ budget ------|-- rest --|
|                 |             |                    |          adapters, when first used
|                 |             12-bit copies of weights, then the KV cache
|                 logits and tokens of each row
activations, CUDA graphs and libraries
"""

from __future__ import annotations

# Memory for the activations of a full step, CUDA graphs and the workspaces of libraries.
SPARE_BYTES = 6 * 2**30
# The share of the budget that 12-bit copies of weights may take: a smaller cache for faster steps.
_COPY_SHARE = 1 / 6
# A CPU's memory is shared with other processes; this much cache holds 16 long chats.
_CPU_CACHE_BYTES = 512 * 2**20


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def gpu_budget(
    free_bytes: int, max_rows: int, vocab_size: int, longest: int, fraction: float
) -> int:
    """Return the bytes of a GPU for the KV cache and 12-bit copies of weights.

    `free_bytes`: memory that the weights leave free. `longest`: tokens of the longest sequence.
    `fraction`: the share of the remaining memory to use.
    """
    # Two sets of logits in float32, those of the graphs and those of a step, and token ids.
    per_row = 2 * vocab_size * 4 + longest * 8
    return int((free_bytes - SPARE_BYTES - max_rows * per_row) * fraction)


def copy_budget(
    budget: int, block_bytes: int, block_tokens: int, longest: int, cache_tokens: int | None
) -> int:
    """Return the bytes that 12-bit copies of weights may take from the budget.

    One sequence must still fit the cache. A cache of a given size leaves no bytes for copies: the
    user may need the rest of the memory.
    """
    if cache_tokens is not None:
        return 0
    one_sequence = blocks_for(longest, block_tokens) * block_bytes
    return min(int(budget * _COPY_SHARE), budget - one_sequence)


def gpu_blocks(
    budget: int,
    block_bytes: int,
    block_tokens: int,
    longest: int,
    max_rows: int,
    cache_tokens: int | None,
) -> int:
    """Return the number of blocks of a GPU's cache.

    That is what fits the budget, but no more than all rows can fill, and no more than
    `cache_tokens` if it is given. Raises ValueError when not even one sequence fits.
    """
    needed = blocks_for(longest, block_tokens)
    affordable = min(budget // block_bytes, max_rows * needed)
    if cache_tokens is not None and affordable > 0:
        return max(1, min(affordable, cache_tokens // block_tokens))
    if affordable < needed:
        raise ValueError(
            f"the GPU has room for {max(affordable, 0) * block_tokens} cached tokens, one sequence "
            f"of {longest} needs more: lower the longest sequence, or use fewer bits a weight"
        )
    return affordable


def cpu_blocks(
    memory_bytes: int, block_bytes: int, block_tokens: int, longest: int, cache_tokens: int | None
) -> int:
    """Return the number of blocks of a CPU's cache.

    That is `cache_tokens` if it is given, else 512 MiB and at least one sequence. Raises
    ValueError when `cache_tokens` need more than `memory_bytes`, the memory of the machine.
    """
    if cache_tokens is None:
        return max(_CPU_CACHE_BYTES // block_bytes, blocks_for(longest, block_tokens))
    most_tokens = memory_bytes // block_bytes * block_tokens
    if cache_tokens > most_tokens:
        raise ValueError(
            f"a cache of {cache_tokens} tokens is more than the machine's memory, which "
            f"{most_tokens} would fill: lower max_tokens_in_paged_kv_cache"
        )
    return max(1, cache_tokens // block_tokens)


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
