"""What the table at the start says of the longest request, where the cache is smaller than the
model's reach.
"""

from dataclasses import replace

from slipstream.engine.messages import EngineInfo
from slipstream.server.engine_link.pool import memory_table
from slipstream.server.metrics.engine_metrics import _memory_metrics

INFO = EngineInfo(
    vocab_size=100,
    max_sequence_tokens=8190,
    max_rows=64,
    total_blocks=728,
    block_tokens=32,
    device="cpu",
    dtype="float32",
    weight_bytes=2**20,
    cache_bytes=2**20,
    load_seconds=1.0,
)


def test_a_cache_for_the_longest_sequence():
    last = memory_table("m", INFO)[-1]
    assert last == "  22 requests of 1024 tokens at once; 64 of any length, up to 8190 tokens each"


def test_a_cache_that_cannot_hold_one_says_what_it_takes():
    lines = memory_table("m", replace(INFO, total_blocks=3))
    assert lines[-2] == "  1 requests of 96 tokens at once; 64 of any length, up to 96 tokens each"
    assert lines[-1] == (
        "  the model takes sequences of 8190 tokens; max_tokens_in_paged_kv_cache 8192 would hold one"
    )


def test_with_a_window_sequences_may_be_longer_than_the_cache():
    assert memory_table("m", replace(INFO, total_blocks=3, windowed=True))[-1].endswith(
        "up to 8190 tokens each"
    )


def test_copies_of_weights_stand_below_the_weights():
    lines = memory_table("m", replace(INFO, compressed_weight_bytes=3 * 2**20))
    assert lines[2] == "  the same, packed          3 MiB  what steps of few tokens read"
    assert len(memory_table("m", INFO)) == len(lines) - 1


def test_copies_of_weights_are_memory_that_is_taken():
    info = replace(INFO, device="cuda", weight_bytes=1, compressed_weight_bytes=2, cache_bytes=4)
    assert _memory_metrics(info, None) == {"cpu": 0, "gpu": 7, "pinned": 0}
