"""The settings of an engine by the names that users of vLLM and TensorRT-LLM know: the flags of
`slipstream start` and the options of `slipstream.LLM`. No torch here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from slipstream.engine.settings import EngineSettings

# setting → its names; messages use the first
OPTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_rows": ("max_batch_size", "max_num_seqs"),
    "max_sequence_tokens": ("max_seq_len", "max_model_len"),
    "step_tokens": ("max_num_tokens", "max_num_batched_tokens"),
    "cache_memory_fraction": (
        "kv_cache_free_gpu_mem_fraction",
        "kv_cache_free_gpu_memory_fraction",
    ),
    "gpu_memory_utilization": ("gpu_memory_utilization",),
    "cache_bytes": ("kv_cache_memory_bytes",),
    "cache_dtype": ("kv_cache_dtype",),
    "reuse": ("enable_prefix_caching", "enable_kv_cache_reuse"),
    "chunked": ("enable_chunked_prefill", "enable_chunked_context"),
    "policy": ("scheduler_policy", "batch_scheduler_policy"),
    "ranks": ("ranks", "tensor_parallel_size"),
}
_SETTINGS = {name: setting for setting, names in OPTION_NAMES.items() for name in names}
_SIZE = re.compile(r"(\d+|\d+\.\d+)([kKmMgGtT]?)")
# vLLM's suffixes: capital letters are binary
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


_MAX_DIGITS = 40  # of a size


def flags(setting: str) -> tuple[str, ...]:
    """Return the flags of the command line for a setting."""
    return tuple(f"--{name.replace('_', '-')}" for name in OPTION_NAMES[setting])


def flag(setting: str) -> str:
    """Return the flag that messages name."""
    return flags(setting)[0]


def read_size(text: str) -> int:
    """Return a whole number such as 4096, 32k, 512M or 1.5G. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    number = Fraction(0)
    if match is not None and len(text) <= _MAX_DIGITS:
        number = Fraction(match.group(1)) * _UNITS[match.group(2)]
    if number < 1 or number.denominator != 1:
        raise ValueError(
            f"must be a whole number of at least 1, such as 4096, 32K or 1.5G, not '{text}'"
        )
    return int(number)


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `EngineSettings` from options by any of their names.

    Raises ValueError if a setting is given twice, and TypeError for an unknown name.
    """
    names: dict[str, str] = {}  # setting → the name it was given by
    settings: dict[str, Any] = {}
    for name, value in given.items():
        setting = _SETTINGS.get(name, name)
        if setting in names:
            raise ValueError(f"{names[setting]} and {name} are the same setting: give one of them")
        names[setting] = name
        settings[setting] = read_size(value) if _is_size(setting, value) else value
    known = {field.name for field in fields(EngineSettings)}
    for setting, name in names.items():
        if setting not in known:
            raise TypeError(f"there is no setting {name!r}{_suggest(name, known)}")
    if {"cache_memory_fraction", "gpu_memory_utilization"} <= names.keys():
        raise ValueError(
            f"{names['gpu_memory_utilization']} and {names['cache_memory_fraction']} exclude each "
            "other: the first is a share of all GPU memory, the second of what the weights leave "
            "free"
        )
    return settings


def _is_size(setting: str, value: Any) -> bool:
    return setting == "cache_bytes" and isinstance(value, str)


def _suggest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, [*_SETTINGS, *known], n=1)
    return f"; did you mean {close[0]}?" if close else ""
