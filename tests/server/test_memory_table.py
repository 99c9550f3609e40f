"""The memory table at the start: requests that fit the cache, and copies of weights."""

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


def test_table_shows_how_many_requests_fit_the_cache():
    last = memory_table("m", INFO)[-1]
    assert last == "  22 requests of 1024 tokens at once; 64 of any length, up to 8190 tokens each"


def test_cache_below_one_sequence_names_the_setting_that_would_hold_it():
    lines = memory_table("m", replace(INFO, total_blocks=3))
    assert lines[-2] == "  1 requests of 96 tokens at once; 64 of any length, up to 96 tokens each"
    assert lines[-1] == (
        "  the model takes sequences of 8190 tokens; max_tokens_in_paged_kv_cache 8192 would hold one"
    )


def test_windowed_sequences_may_be_longer_than_the_cache():
    assert memory_table("m", replace(INFO, total_blocks=3, windowed=True))[-1].endswith(
        "up to 8190 tokens each"
    )


def test_packed_weights_are_listed_below_the_weights():
    lines = memory_table("m", replace(INFO, compressed_weight_bytes=3 * 2**20))
    assert lines[2] == "  12-bit weights            3 MiB  copies, read by steps of up to 32 tokens"
    assert len(memory_table("m", INFO)) == len(lines) - 1


def test_packed_weights_count_as_used_memory():
    info = replace(INFO, device="cuda", weight_bytes=1, compressed_weight_bytes=2, cache_bytes=4)
    assert _memory_metrics(info, None) == {"cpu": 0, "gpu": 7, "pinned": 0}
