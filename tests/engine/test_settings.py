"""Settings of an engine: limits, and the switches of the kernels' optimisations."""

from dataclasses import asdict

import pytest
from run_engine import engine
from tiny_engine import build_tiny_engine

from slipstream.engine.settings import EngineSettings
from slipstream.engine.sizes import BuiltLimits, choose_sizes
from slipstream.kernels.options import KernelOptions

SWITCHES = ("compressed_weights", "compressed_kv_cache", "fused_gemv", "mixed_graphs")


def test_all_switches_are_on_by_default():
    assert EngineSettings().kernel_options == KernelOptions()
    options = asdict(KernelOptions())
    assert [name for name, on in options.items() if on] == list(SWITCHES)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_turns_off_one_option(name):
    options = asdict(EngineSettings(**{name: False}).kernel_options)
    assert [switch for switch in SWITCHES if not options[switch]] == [name]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_survives_the_way_to_the_engine_process(name):
    settings = EngineSettings(**{name: False})
    assert EngineSettings.from_json(settings.to_json()) == settings


def test_switches_reach_the_model(tmp_path):
    folder = build_tiny_engine(tmp_path)
    loop = engine(folder, cache_tokens=256, fused_gemv=False, compressed_weights=False)
    assert loop.runner.model.options == KernelOptions(fused_gemv=False, compressed_weights=False)
    assert loop.info.compressed_weight_bytes == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rows": 0}, "max_rows must be at least 1, not 0"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, not 0"),
        ({"step_tokens": 0}, "step_tokens must be at least 1, not 0"),
        ({"max_sequence_tokens": -5}, "max_sequence_tokens must be at least 1, not -5"),
        ({"cache_tokens": 0}, "cache_tokens must be at least 1, not 0"),
        ({"cache_bytes": 8e6}, "cache_bytes must be a whole number, not 8000000.0"),
        ({"max_sequence_tokens": "128"}, "max_sequence_tokens must be a whole number, not '128'"),
        ({"max_beam_width": 0}, "max_beam_width must be at least 1, not 0"),
        ({"policy": "fair"}, "policy must be guaranteed_no_evict or max_utilization, not 'fair'"),
        ({"cache_memory_fraction": 0.0}, r"cache_memory_fraction must be in \(0, 1\], not 0.0"),
        ({"adapter_memory_fraction": 1.5}, r"adapter_memory_fraction must be in \(0, 1\], not 1.5"),
        ({"adapter_host_bytes": 0}, "adapter_host_bytes must be at least 1, not 0"),
        ({"adapter_page_rank": 65}, "adapter ranks must rise from 1 to 256: a page's rank 65"),
        ({"attention_windows": [5, 0]}, r"attention windows must be at least 1, not \[5, 0\]"),
        ({"sink_tokens": 4}, "4 sink tokens need a larger attention window"),
        ({"host_cache_bytes": -1}, "host_cache_bytes must not be negative, got -1"),
        ({"lookup_tokens": -1}, "lookup_tokens must not be negative, got -1"),
    ],
)
def test_a_value_out_of_range_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineSettings(**settings)


def test_a_longer_sequence_than_the_engine_was_built_for_is_lowered_with_a_warning(caplog):
    for wanted, used in ((None, 2048), (1000, 1000), (2048, 2048), (10**6, 2048)):
        settings = EngineSettings(max_sequence_tokens=wanted)
        assert choose_sizes(settings, BuiltLimits(2048), "cpu", 1).longest == used
    assert [record.getMessage() for record in caplog.records] == [
        "max_seq_len 1000000 is more than this engine was built for: sequences have at most 2048 "
        "tokens"
    ]
