"""The arithmetic of an engine's memory, by number."""

import pytest

from slipstream.engine import memory

BLOCK_TOKENS = 32
BLOCK_BYTES = 4096
GIB = 2**30


def test_gpu_budget_leaves_room_for_steps_and_rows():
    # 64 rows: two sets of 1000 float32 logits, and 100 token ids of 8 bytes, each
    per_row = 2 * 1000 * 4 + 100 * 8
    free = memory.SPARE_BYTES + 64 * per_row + 1_000_000
    assert memory.gpu_budget(free, 64, 1000, 100, fraction=1.0) == 1_000_000
    assert memory.gpu_budget(free, 64, 1000, 100, fraction=0.9) == 900_000


def test_gpu_budget_is_negative_when_the_spare_memory_does_not_fit():
    assert memory.gpu_budget(5 * GIB, 1, 0, 0, fraction=1.0) == -1 * GIB


def test_llama_3_8b_on_an_h200_keeps_about_110_gib_for_the_cache():
    free = int(139.8 * GIB) - 16 * GIB
    budget = memory.gpu_budget(free, 256, 128_256, 8192, fraction=0.95)
    per_rows = 256 * (2 * 128_256 * 4 + 8192 * 8)
    assert budget == int((free - 6 * GIB - per_rows) * 0.95)
    assert 110 < budget / GIB < 112


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
    assert memory.copy_budget(budget, BLOCK_BYTES, BLOCK_TOKENS, longest, None) == expected


def test_compressed_weights_get_no_memory_when_the_cache_size_is_given():
    assert memory.copy_budget(120 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_TOKENS, 64, 320) == 0


@pytest.mark.parametrize(
    ("budget_blocks", "cache_tokens", "expected"),
    [
        (100, None, 100),
        (1000, None, 128),  # 64 rows of 64 tokens: two blocks each
        (100, 320, 10),
        (100, 31, 1),  # at least one block
        (5, 320, 5),  # the smaller limit wins
    ],
)
def test_gpu_blocks(budget_blocks, cache_tokens, expected):
    budget = budget_blocks * BLOCK_BYTES
    found = memory.gpu_blocks(budget, BLOCK_BYTES, BLOCK_TOKENS, 64, 64, cache_tokens)
    assert found == expected


def test_a_part_of_a_block_does_not_count():
    budget = 3 * BLOCK_BYTES - 1
    assert memory.gpu_blocks(budget, BLOCK_BYTES, BLOCK_TOKENS, 64, 64, None) == 2


@pytest.mark.parametrize(
    ("budget_blocks", "cache_tokens", "tokens"), [(1, None, 32), (0, 640, 0), (-3, None, 0)]
)
def test_a_gpu_without_memory_for_one_sequence_is_an_error(budget_blocks, cache_tokens, tokens):
    budget = budget_blocks * BLOCK_BYTES
    with pytest.raises(
        ValueError, match=f"room for {tokens} cached tokens, one sequence of 64 needs more"
    ):
        memory.gpu_blocks(budget, BLOCK_BYTES, BLOCK_TOKENS, 64, 64, cache_tokens)


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
    found = memory.cpu_blocks(64 * GIB, BLOCK_BYTES, BLOCK_TOKENS, longest, cache_tokens)
    assert found == expected


def test_a_cache_larger_than_the_machines_memory_is_an_error():
    machine = 100 * BLOCK_BYTES + 1
    assert memory.cpu_blocks(machine, BLOCK_BYTES, BLOCK_TOKENS, 64, 3200) == 100
    with pytest.raises(ValueError, match="which 3200 would fill: lower max_tokens_in_paged_kv"):
        memory.cpu_blocks(machine, BLOCK_BYTES, BLOCK_TOKENS, 64, 3201)


def test_host_slots_are_whole_blocks():
    cache_bytes = 11 * BLOCK_BYTES  # ten blocks and the null block
    assert memory.host_slots(0, cache_bytes, 10) == 0
    assert memory.host_slots(BLOCK_BYTES - 1, cache_bytes, 10) == 0
    assert memory.host_slots(7 * BLOCK_BYTES, cache_bytes, 10) == 7


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, 8),  # one adapter of the largest rank always fits
        (20 * 1000, 20),
        (10**9, 64 * 8),  # no more than all rows can use
    ],
)
def test_adapter_pages(room, expected):
    assert memory.adapter_pages(room, 1000, pages_per_adapter=8, max_rows=64) == expected
