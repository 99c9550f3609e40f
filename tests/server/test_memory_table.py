"""The table at the start: memory, capacity, what decided it and how to fit more."""

from dataclasses import replace

import pytest

from slipstream.engine.messages import EngineInfo
from slipstream.server.engine_link.memory_table import memory_table, node_advice
from slipstream.server.metrics.engine_metrics import _memory_metrics

INFO = EngineInfo(
    vocab_size=100,
    max_sequence_tokens=8190,
    max_rows=182,
    total_blocks=728,
    block_tokens=32,
    device="cpu",
    dtype="bfloat16",
    weight_bytes=257 * 2**20,
    cache_bytes=729 * 32 * 23040,
    load_seconds=1.04,
    step_tokens=512,
    rows_bound="cache",
    cache_dtype="bfloat16",
)
GPU = replace(
    INFO,
    device="cuda:0",
    step_tokens=8192,
    total_blocks=35_000,
    cache_bytes=35_001 * 3 * 2**20,
    max_rows=1024,
    rows_bound="default",
    weight_bytes=16_060 * 2**20,
    compressed_weight_bytes=3 * 2**20,
    step_bytes=4 * 2**30,
    graph_bytes=300 * 2**20,
    cache_dtype="bfloat16 in 12 bits",
)


def test_the_table_of_a_cpu():
    assert memory_table("m", INFO) == [
        "m on cpu, loaded in 1.0 s:",
        "  weights                257 MiB     computed in bfloat16",
        "  KV cache               513 MiB     23296 tokens in bfloat16",
        "  requests at once       182         limited by the KV cache",
        "  tokens per step        512",
        "  longest sequence      8190 tokens",
        "  The KV cache holds 22 requests of 1024 tokens at once.",
        "  To run more at once: --kv-cache-memory-bytes N.",
    ]


def test_the_table_says_how_many_ranks_there_are_and_that_sizes_are_of_one():
    first, weights, *_ = memory_table("m", replace(INFO, ranks=4))
    assert first == "m on cpu with 4 ranks (MiB: of each rank), loaded in 1.0 s:"
    assert weights == "  weights                257 MiB     computed in bfloat16"


def test_the_table_of_a_gpu_with_the_defaults():
    assert memory_table("m", GPU) == [
        "m on cuda:0, loaded in 1.0 s:",
        "  weights              16060 MiB     computed in bfloat16",
        "  12-bit weights           3 MiB     copies for steps of up to 32 tokens",
        "  KV cache            105003 MiB     1120000 tokens in bfloat16 in 12 bits",
        "  a full step           4096 MiB     activations",
        "  captured steps         300 MiB     decode graphs",
        "  requests at once      1024         the default",
        "  tokens per step       8192",
        "  longest sequence      8190 tokens",
        "  The KV cache holds 1093 requests of 1024 tokens at once.",
    ]


@pytest.mark.parametrize(
    ("bound", "flags", "note", "advice"),
    [
        ("setting", ["max_rows"], "set by --max-batch-size", None),
        ("setting", [], "set by max_num_sequences in config.pbtxt", "--max-batch-size N."),
        ("build", [], "the build's max_batch_size", "--max-batch-size N."),
        ("step", ["step_tokens"], "limited by the tokens per step", "a larger --max-num-tokens."),
        ("memory", [], "limited by free memory", "a shorter --max-seq-len."),
        ("engine", ["max_rows"], "the most of an engine", None),
        (
            "cache",
            [],
            "limited by the KV cache",
            "--kv-cache-dtype fp8, or --weight-only int8.",
        ),
        ("cache", ["cache_bytes"], "limited by the KV cache", "--kv-cache-memory-bytes N."),
    ],
)
def test_rows_have_a_reason_and_advice(bound, flags, note, advice):
    lines = memory_table("m", replace(GPU, rows_bound=bound), flags)
    assert next(line for line in lines if "requests at once" in line).endswith(f"  {note}")
    found = [line.removeprefix("  To run more at once: ") for line in lines if "more at" in line]
    assert found == ([] if advice is None else [advice])
    assert max(map(len, lines)) <= 80


def test_sizes_that_flags_set_are_marked():
    lines = memory_table("m", INFO, ["step_tokens", "max_sequence_tokens"])
    assert lines[4] == "  tokens per step        512         set by --max-num-tokens"
    assert lines[5] == "  longest sequence      8190 tokens  set by --max-seq-len"


@pytest.mark.parametrize("flags", [(), ("max_sequence_tokens",)])
def test_a_cache_below_one_sequence_names_the_size_that_would_hold_it(flags):
    lines = memory_table("m", replace(INFO, total_blocks=3, cache_bytes=4 * 32 * 23040), flags)
    assert lines[-4:-1] == [
        "  longest sequence        96 tokens  limited by the KV cache",
        "  The KV cache holds 1 request of 96 tokens at once.",
        "  For sequences of 8190 tokens: --kv-cache-memory-bytes 180M.",
    ]


def test_windowed_sequences_may_be_longer_than_the_cache():
    lines = memory_table("m", replace(INFO, total_blocks=3, windowed=True))
    assert "  longest sequence      8190 tokens" in lines


def test_flags_without_effect_on_the_device_are_listed():
    flags = ["cache_dtype", "gpu_memory_utilization"]
    assert memory_table("m", INFO, flags)[-2:] == [
        "  --gpu-memory-utilization has no effect on a CPU: use --kv-cache-memory-bytes.",
        "  --kv-cache-dtype fp8 has no effect: this device has no FP8.",
    ]
    assert memory_table("m", replace(GPU, cache_dtype="fp8"), flags) == memory_table(
        "m", replace(GPU, cache_dtype="fp8")
    )


@pytest.mark.parametrize(
    ("device", "replicas", "nodes", "advice"),
    [
        ("cpu", 1, 2, "2 NUMA nodes: --replicas 2 runs an engine on each"),
        ("cpu", 1, 4, "4 NUMA nodes: --replicas 4 runs an engine on each"),
        ("cpu", 1, 1, ""),
        ("cpu", 1, 0, ""),  # a system that does not say
        ("cpu", 2, 2, ""),
        ("cuda:0", 1, 2, ""),
    ],
)
def test_nodes_without_a_replica_are_named(device, replicas, nodes, advice):
    found = node_advice(replace(INFO, device=device), replicas, nodes)
    assert len(found) == bool(advice)
    assert advice in "".join(found)


def test_packed_weights_count_as_used_memory():
    info = replace(INFO, device="cuda", weight_bytes=1, compressed_weight_bytes=2, cache_bytes=4)
    assert _memory_metrics(info, None) == {"cpu": 0, "gpu": 7, "pinned": 0}
