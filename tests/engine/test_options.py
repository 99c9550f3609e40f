"""Engine settings by the names of vLLM and TensorRT-LLM."""

from dataclasses import fields

import pytest

from slipstream.engine.options import OPTION_NAMES, flag, flags, read_options, read_size
from slipstream.engine.settings import EngineSettings


def test_every_name_is_one_setting():
    assert OPTION_NAMES.keys() <= {field.name for field in fields(EngineSettings)}
    names = [name for names in OPTION_NAMES.values() for name in names]
    assert len(names) == len(set(names))
    assert flags("max_rows") == ("--max-batch-size", "--max-num-seqs")
    assert flag("reuse") == "--enable-prefix-caching"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5G", 3 * 2**29),
        ("2t", 2e12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_have_vllms_suffixes(text, number):
    assert read_size(text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "0.0001k", "k", "1KB", "1 G", "1e3", "nan", "9" * 400]
)
def test_other_sizes_are_errors(text):
    with pytest.raises(ValueError, match="must be a whole number of at least 1, such as 4096"):
        read_size(text)


def test_options_become_fields_of_the_settings():
    given = {
        "max_num_seqs": 3,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "1M",
        "enable_prefix_caching": False,
        "threads": 2,
    }
    assert read_options(given) == {
        "max_rows": 3,
        "max_sequence_tokens": 64,
        "cache_bytes": 2**20,
        "reuse": False,
        "threads": 2,
    }


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_rows": 1, "max_batch_size": 1}, "max_rows and max_batch_size are the same setting"),
        (
            {"gpu_memory_utilization": 0.9, "kv_cache_free_gpu_mem_fraction": 0.9},
            "gpu_memory_utilization and kv_cache_free_gpu_mem_fraction exclude each other",
        ),
    ],
)
def test_settings_that_are_given_twice_are_errors(given, error):
    with pytest.raises(ValueError, match=error):
        read_options(given)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(
        TypeError, match=r"no setting .max_batchsize.; did you mean max_batch_size\?"
    ):
        read_options({"max_batchsize": 1})
