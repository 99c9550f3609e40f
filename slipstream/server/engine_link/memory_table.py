"""The table at the start of a server: how an engine uses its memory, and how much runs at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.engine.messages import EngineInfo
from slipstream.engine.options import flag

_TYPICAL_TOKENS = 1024  # prompt and answer of a typical chat
# what decided the number of requests at once, unless it is a setting
_ROW_BOUNDS = {
    "build": "the build's max_batch_size",
    "default": "the default",
    "cache": "limited by the KV cache",
    "step": "limited by the tokens per step",
    "memory": "limited by free memory",
    "engine": "the most of an engine",
}


class _Line(NamedTuple):
    label: str
    number: int
    unit: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.label:<17}{self.number:>9} {self.unit:<6}  {self.note}".rstrip()


def memory_table(name: str, info: EngineInfo, flags: Collection[str] = ()) -> list[str]:
    """Return the lines of the table of an engine.

    flags: engine settings that the command line gave
    """
    tokens = info.total_blocks * info.block_tokens
    longest = info.max_sequence_tokens if info.windowed else min(info.max_sequence_tokens, tokens)
    typical = min(_TYPICAL_TOKENS, longest)
    fitting = tokens // typical
    lines = [
        *_memory_lines(info, tokens),
        _Line("requests at once", info.max_rows, note=_row_note(info, flags)),
        _Line("tokens per step", info.step_tokens, note=_flag_note("step_tokens", flags)),
        _Line("longest sequence", longest, "tokens", _length_note(info, longest, flags)),
    ]
    advice = [*_too_short(info, longest), *_more_rows(info, flags), *_no_effect(info, flags)]
    return [
        f"{name} on {_device(info)}, loaded in {info.load_seconds:.1f} s:",
        *map(str, lines),
        f"  The KV cache holds {_count(fitting)} of {typical} tokens at once.",
        *(f"  {text}" for text in advice),
    ]


def node_advice(info: EngineInfo, replicas: int, nodes: int) -> list[str]:
    """Return a line for an engine on a CPU whose other NUMA nodes have no replica."""
    if info.device != "cpu" or replicas > 1 or nodes < 2:
        return []
    return [
        f"  This machine has {nodes} NUMA nodes: --replicas {nodes} runs an engine on each, with "
        "local memory."
    ]


def titled_replicas(name: str, infos: Sequence[EngineInfo]) -> list[tuple[str, EngineInfo]]:
    """Return the tables to show for the replicas of an engine: one for all that are equal."""
    if len(infos) == 1:
        return [(name, infos[0])]
    alike = {replace(info, load_seconds=0.0) for info in infos}
    if len(alike) == 1:
        slowest = max(infos, key=lambda info: info.load_seconds)
        return [(f"{name}, each of {len(infos)} replicas", slowest)]
    return [(f"{name} replica {index}", info) for index, info in enumerate(infos)]


def _device(info: EngineInfo) -> str:
    """Return the device. With several ranks, the table has the memory of one of them."""
    if info.ranks == 1:
        return info.device
    return f"{info.device} with {info.ranks} ranks (MiB: of each rank)"


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests"


def _memory_lines(info: EngineInfo, tokens: int) -> list[_Line]:
    sizes = [
        ("weights", info.weight_bytes, f"computed in {info.dtype}"),
        ("12-bit weights", info.compressed_weight_bytes, "copies for steps of up to 32 tokens"),
        ("KV cache", info.cache_bytes, f"{tokens} tokens in {info.cache_dtype or info.dtype}"),
        ("a full step", info.step_bytes, "activations"),
        ("captured steps", info.graph_bytes, "decode graphs"),
    ]
    return [_Line(label, round(size / 2**20), "MiB", note) for label, size, note in sizes if size]


def _flag_note(setting: str, flags: Collection[str]) -> str:
    return f"set by {flag(setting)}" if setting in flags else ""


def _row_note(info: EngineInfo, flags: Collection[str]) -> str:
    if info.rows_bound == "setting":
        return _flag_note("max_rows", flags) or "set by max_num_sequences in config.pbtxt"
    return _ROW_BOUNDS.get(info.rows_bound, "")


def _length_note(info: EngineInfo, longest: int, flags: Collection[str]) -> str:
    if longest < info.max_sequence_tokens:
        return _ROW_BOUNDS["cache"]
    return _flag_note("max_sequence_tokens", flags)


def _too_short(info: EngineInfo, longest: int) -> list[str]:
    """Return the advice for a cache that cannot hold one sequence of the longest length."""
    if longest == info.max_sequence_tokens:
        return []
    blocks = -(-info.max_sequence_tokens // info.block_tokens)
    block_bytes = info.cache_bytes // (info.total_blocks + 1)  # with the null block
    enough = -(-blocks * block_bytes // 2**20)
    return [f"For sequences of {info.max_sequence_tokens} tokens: {flag('cache_bytes')} {enough}M."]


def _more_rows(info: EngineInfo, flags: Collection[str]) -> list[str]:
    """Return what to change to run more requests at once, unless the command line set it."""
    changes = {
        "build": f"{flag('max_rows')} N",
        "cache": f"{flag('cache_bytes')} N",
        "step": f"a larger {flag('step_tokens')}",
        "memory": f"a shorter {flag('max_sequence_tokens')}",
    }
    if info.rows_bound == "setting" and "max_rows" not in flags:
        changes["setting"] = f"{flag('max_rows')} N"
    if info.rows_bound == "cache" and _fills_gpu(info, flags):
        changes["cache"] = f"{flag('cache_dtype')} fp8, or --weight-only int8"
    change = changes.get(info.rows_bound)
    return [] if change is None else [f"To run more at once: {change}."]


def _fills_gpu(info: EngineInfo, flags: Collection[str]) -> bool:
    sizes = {"cache_bytes", "cache_memory_fraction", "gpu_memory_utilization"}
    return info.device.startswith("cuda") and not sizes & set(flags)


def _no_effect(info: EngineInfo, flags: Collection[str]) -> list[str]:
    lines = []
    on_gpu = info.device.startswith("cuda")
    for setting in ("cache_memory_fraction", "gpu_memory_utilization"):
        if setting in flags and not on_gpu:
            lines.append(f"{flag(setting)} has no effect on a CPU: use {flag('cache_bytes')}.")
    if "cache_dtype" in flags and info.cache_dtype != "fp8":
        lines.append(f"{flag('cache_dtype')} fp8 has no effect: this device has no FP8.")
    return lines
