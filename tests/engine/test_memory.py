"""The arithmetic of an engine's memory, by number."""

from dataclasses import replace

import pytest

from slipstream.engine.memory import division
from slipstream.engine.memory.division import RowLimits, SequenceSizes

BLOCK_TOKENS = 32
BLOCK_BYTES = 4096
GIB = 2**30
SMALL = SequenceSizes(BLOCK_BYTES, BLOCK_TOKENS, longest=64, vocab_size=1000)
# The 12-bit KV cache of a GPU takes 1.5 bytes a number: layers * 2 * KV heads * head size * 1.5.
LLAMA_3_8B = SequenceSizes(32 * 98_304, 32, longest=8192, vocab_size=128_256)
LLAMA_3_70B = SequenceSizes(32 * 245_760, 32, longest=8192, vocab_size=128_256)
QWEN_3_0_6B = SequenceSizes(32 * 86_016, 32, longest=40_960, vocab_size=151_936)
SMOLLM2_135M = SequenceSizes(32 * 23_040, 32, longest=8192, vocab_size=49_152)  # bfloat16
UNLIMITED = RowLimits()


def resized(sizes, longest):
    return replace(sizes, longest=longest)


def test_gpu_budget_leaves_room_for_steps_and_rows():
    # 64 rows: two sets of 1000 float32 logits, 64 token ids of 8 bytes and 2 blocks of 4 each
    per_row = 2 * 1000 * 4 + 64 * 8 + 2 * 4
    assert SMALL.row_bytes == per_row
    free = division.SPARE_BYTES + 64 * per_row + 1_000_000
    assert division.gpu_budget(free, 64, SMALL, 8192, fraction=1.0) == 1_000_000
    assert division.gpu_budget(free, 64, SMALL, 8192, fraction=0.9) == 900_000


def test_steps_of_more_tokens_get_more_spare_memory():
    free = 2 * division.SPARE_BYTES + 1_000_000
    assert division.gpu_budget(free, 0, SMALL, 16_384, fraction=1.0) == 1_000_000
    assert (
        division.gpu_budget(free, 0, SMALL, 512, fraction=1.0) == division.SPARE_BYTES + 1_000_000
    )


def test_gpu_budget_is_negative_when_the_spare_memory_does_not_fit():
    assert division.gpu_budget(5 * GIB, 0, SMALL, 8192, fraction=1.0) == -1 * GIB


@pytest.mark.parametrize(
    ("gpu_gib", "weights_gib", "sizes", "rows", "cache_gib"),
    [
        # H200
        (139.8, 16.1, LLAMA_3_8B, 1024, 105.0),
        (139.8, 1.2, QWEN_3_0_6B, 1024, 118.0),
        (139.8, 39.5, LLAMA_3_70B, 1024, 83.9),  # int4
        (139.8, 131.4, LLAMA_3_70B, 64, 2.1),
        (79.1, 16.1, LLAMA_3_8B, 1024, 50.4),
        (79.1, 39.5, LLAMA_3_70B, 508, 29.8),
        # smaller GPUs
        (23.6, 16.1, LLAMA_3_8B, 64, 1.3),
        (23.6, 5.7, LLAMA_3_8B, 439, 10.3),  # int4
        (15.6, 5.7, LLAMA_3_8B, 144, 3.4),
        (15.6, 1.2, QWEN_3_0_6B, 346, 7.1),
        (11.6, 1.2, QWEN_3_0_6B, 181, 3.7),
        (7.6, 0.3, SMOLLM2_135M, 199, 1.1),
    ],
)
def test_rows_and_cache_of_a_gpu(gpu_gib, weights_gib, sizes, rows, cache_gib):
    free = int((gpu_gib - weights_gib) * GIB)
    found, _ = division.gpu_rows(free, sizes, 8192, 0.9, None, UNLIMITED)
    budget = division.gpu_budget(free, found, sizes, 8192, 0.9)
    assert (found, round(budget / GIB, 1)) == (rows, cache_gib)
    # one sequence fits, and what all parts take is less than what is free
    assert division.gpu_blocks(budget, sizes, found, True, None) >= sizes.blocks
    assert division.SPARE_BYTES + found * sizes.row_bytes + budget < free


def test_rows_leave_room_for_one_sequence():
    # 8192 tokens take 768 MiB; the memory beside them holds 40 rows
    room = 256 * LLAMA_3_8B.block_bytes + 40 * LLAMA_3_8B.row_bytes
    free = division.SPARE_BYTES + room
    assert division.gpu_rows(free, LLAMA_3_8B, 8192, 1.0, None, UNLIMITED) == (40, "memory")
    budget = division.gpu_budget(free, 40, LLAMA_3_8B, 8192, 1.0)
    assert division.gpu_blocks(budget, LLAMA_3_8B, 40, True, None) == 256
    # without room for one sequence the number of blocks is the error
    found = division.gpu_rows(free - 50 * 2**20, LLAMA_3_8B, 8192, 1.0, None, UNLIMITED)
    assert found == (1, "memory")


H200_FREE = int((139.8 - 16.1) * GIB)


@pytest.mark.parametrize(
    ("limits", "cache_tokens", "step_tokens", "rows"),
    [
        (RowLimits(wanted=1), None, 8192, (1, "setting")),
        (RowLimits(wanted=2048), None, 8192, (2048, "setting")),
        (RowLimits(wanted=100_000), None, 8192, (4096, "engine")),  # graphs end there
        (RowLimits(wanted=300, build=4), None, 8192, (300, "setting")),
        (RowLimits(build=4), None, 8192, (4, "build")),
        (RowLimits(build=512), None, 8192, (512, "build")),
        (RowLimits(build=2048), None, 8192, (2048, "build")),
        (UNLIMITED, None, 8192, (1024, "default")),
        (UNLIMITED, None, 256, (256, "step")),  # more could not all advance in one step
        (UNLIMITED, None, 16, (64, "step")),
        (UNLIMITED, 100_000, 8192, (390, "cache")),  # a cache of a given size: 256 tokens for each
        (UNLIMITED, 2560, 8192, (64, "cache")),
    ],
)
def test_rows_of_an_h200_by_limits(limits, cache_tokens, step_tokens, rows):
    found = division.gpu_rows(H200_FREE, LLAMA_3_8B, step_tokens, 0.9, cache_tokens, limits)
    assert found == rows


def test_wanted_rows_are_lowered_to_those_that_fit():
    free = division.SPARE_BYTES + 2 * GIB
    found, bound = division.gpu_rows(free, LLAMA_3_8B, 8192, 0.9, None, RowLimits(wanted=4096))
    assert (found, bound) == (1146, "memory")
    assert division.gpu_budget(free, found, LLAMA_3_8B, 8192, 0.9) >= 256 * LLAMA_3_8B.block_bytes


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (64, 20 * BLOCK_BYTES),  # a sixth of 120 blocks
        (110 * BLOCK_TOKENS, 10 * BLOCK_BYTES),  # one sequence takes 110 blocks
        (110 * BLOCK_TOKENS + 1, 9 * BLOCK_BYTES),  # and one token more 111
    ],
)
def test_compressed_weights_take_a_sixth_but_leave_room_for_one_sequence(longest, expected):
    budget = 120 * BLOCK_BYTES
    assert division.copy_budget(budget, resized(SMALL, longest), None) == expected


def test_compressed_weights_get_no_memory_when_the_cache_size_is_given():
    assert division.copy_budget(120 * BLOCK_BYTES, SMALL, 320) == 0


@pytest.mark.parametrize(
    ("budget_blocks", "reuse", "cache_tokens", "expected"),
    [
        (100, True, None, 100),
        (1000, True, None, 1000),  # blocks that no row needs keep earlier prompts
        (10**9, True, None, 131_072),  # 4 Mi tokens
        (1000, False, None, 128),  # 64 rows of 64 tokens: two blocks each
        (100, True, 320, 10),
        (100, True, 31, 1),  # at least one block
        (5, True, 320, 5),  # the smaller limit wins
    ],
)
def test_gpu_blocks(budget_blocks, reuse, cache_tokens, expected):
    budget = budget_blocks * BLOCK_BYTES
    assert division.gpu_blocks(budget, SMALL, 64, reuse, cache_tokens) == expected


def test_one_sequence_may_be_longer_than_the_largest_pool():
    long = resized(SMALL, 2**23)
    assert division.gpu_blocks(10**12, long, 64, True, None) == 2**23 // BLOCK_TOKENS


def test_a_part_of_a_block_does_not_count():
    assert division.gpu_blocks(3 * BLOCK_BYTES - 1, SMALL, 64, True, None) == 2


@pytest.mark.parametrize(
    ("budget_blocks", "cache_tokens", "tokens"), [(1, None, 32), (0, 640, 0), (-3, None, 0)]
)
def test_a_gpu_without_memory_for_one_sequence_is_an_error(budget_blocks, cache_tokens, tokens):
    budget = budget_blocks * BLOCK_BYTES
    with pytest.raises(
        ValueError, match=f"room for {tokens} cached tokens, one sequence of 64 needs more"
    ):
        division.gpu_blocks(budget, SMALL, 64, True, cache_tokens)


@pytest.mark.parametrize(
    ("available_gib", "sizes", "cache_mib", "rows"),
    [
        # machines of 2, 8 and 64 GiB
        (1.2, SMOLLM2_135M, 511, 182),
        (6.5, SMOLLM2_135M, 511, 182),
        (60, SMOLLM2_135M, 511, 182),
        (1.2, QWEN_3_0_6B, 614, 64),  # one sequence would take 3.3 GiB
        (6.5, QWEN_3_0_6B, 3325, 256),
        (60, QWEN_3_0_6B, 3360, 256),
        (0.2, SMOLLM2_135M, 101, 58),
        (60, resized(LLAMA_3_8B, 131_072), 12_288, 256),
        (6.5, resized(LLAMA_3_8B, 131_072), 3327, 256),
    ],
)
def test_rows_and_cache_of_a_cpu(available_gib, sizes, cache_mib, rows):
    available = int(available_gib * GIB)
    blocks = division.cpu_blocks(available, sizes, None)
    found = division.cpu_rows(available, sizes, 512, blocks, UNLIMITED)
    assert (blocks * sizes.block_bytes // 2**20, found.rows) == (cache_mib, rows)


@pytest.mark.parametrize(
    ("limits", "blocks", "step_tokens", "rows"),
    [
        (RowLimits(wanted=1), 728, 512, (1, "setting")),
        (RowLimits(wanted=500), 728, 512, (500, "setting")),
        (RowLimits(wanted=100_000), 728, 512, (1897, "memory")),  # an eighth of the memory
        (RowLimits(build=4), 728, 512, (4, "build")),
        (RowLimits(build=2048), 10_000, 4096, (1897, "memory")),
        (UNLIMITED, 728, 100, (100, "step")),
        (UNLIMITED, 728, 512, (182, "cache")),
        (UNLIMITED, 10_000, 512, (256, "default")),
        (UNLIMITED, 1, 512, (64, "cache")),
    ],
)
def test_rows_of_a_cpu_by_limits(limits, blocks, step_tokens, rows):
    assert division.cpu_rows(int(6.5 * GIB), SMOLLM2_135M, step_tokens, blocks, limits) == rows


@pytest.mark.parametrize(
    ("longest", "cache_tokens", "expected"),
    [
        (64, None, 2**29 // BLOCK_BYTES),  # 512 MiB
        (2**23, None, 2**23 // BLOCK_TOKENS),  # one long sequence
        (64, 3200, 100),
        (64, 31, 1),
    ],
)
def test_cpu_blocks(longest, cache_tokens, expected):
    sizes = resized(SMALL, longest)
    assert division.cpu_blocks(60 * GIB, sizes, cache_tokens) == expected


def test_a_cache_larger_than_the_available_memory_is_an_error():
    available = 100 * BLOCK_BYTES + 1
    assert division.cpu_blocks(available, SMALL, 3200) == 100
    with pytest.raises(ValueError, match="which 3200 would fill: lower --kv-cache-memory-bytes"):
        division.cpu_blocks(available, SMALL, 3201)


def test_the_size_of_a_cache_in_bytes_overrides_that_in_tokens():
    assert division.cache_tokens(None, None, SMALL) is None
    assert division.cache_tokens(640, None, SMALL) == 640
    assert division.cache_tokens(640, 10 * BLOCK_BYTES - 1, SMALL) == 9 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("free_gib", "own_gib", "utilization", "usable_gib"),
    [
        (64, 16, 0.9, 56),  # an empty GPU of 80 GiB
        (64, 16, 1.0, 64),
        (28, 16, 0.45, 20),  # another process has taken 36 GiB
        (10, 16, 0.45, 10),  # or 54 GiB
        (64, 16, 0.1, -8),  # the weights alone take more
    ],
)
def test_utilization_is_a_share_of_the_whole_gpu(free_gib, own_gib, utilization, usable_gib):
    found = division.usable_bytes(free_gib * GIB, 80 * GIB, own_gib * GIB, utilization)
    assert found == usable_gib * GIB


def test_host_slots_are_whole_blocks():
    cache_bytes = 11 * BLOCK_BYTES  # ten blocks and the null block
    assert division.host_slots(0, cache_bytes, 10) == 0
    assert division.host_slots(BLOCK_BYTES - 1, cache_bytes, 10) == 0
    assert division.host_slots(7 * BLOCK_BYTES, cache_bytes, 10) == 7


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, 8),  # one adapter of the largest rank always fits
        (20 * 1000, 20),
        (10**9, 64 * 8),  # no more than all rows can use
    ],
)
def test_adapter_pages(room, expected):
    assert division.adapter_pages(room, 1000, pages_per_adapter=8, max_rows=64) == expected
