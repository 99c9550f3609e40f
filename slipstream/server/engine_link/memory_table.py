"""How an engine uses its device, as the lines of one table."""

from __future__ import annotations

from slipstream.engine.messages import EngineInfo

_TYPICAL_TOKENS = 1024  # prompt and answer of a typical chat


def memory_table(name: str, info: EngineInfo) -> list[str]:
    tokens = info.total_blocks * info.block_tokens
    longest = info.max_sequence_tokens if info.windowed else min(info.max_sequence_tokens, tokens)
    typical = min(_TYPICAL_TOKENS, longest)
    at_once = min(info.max_rows, tokens // typical)
    rows = [
        ("weights", info.weight_bytes, f"computed in {info.dtype}"),
        ("key-value cache", info.cache_bytes, f"{tokens} tokens"),
    ]
    if info.copy_bytes:
        rows.insert(1, ("the same, packed", info.copy_bytes, "what steps of few tokens read"))
    if info.step_bytes:
        rows.append(("a full step", info.step_bytes, "activations"))
    if info.graph_bytes:
        rows.append(("captured steps", info.graph_bytes, "decode graphs"))
    lines = [f"{name} on {info.device}, loaded in {info.load_seconds:.1f} s:"]
    lines += [f"  {label:<16} {size / 2**20:>10.0f} MiB  {what}" for label, size, what in rows]
    lines.append(
        f"  {at_once} requests of {typical} tokens at once; {info.max_rows} of any length, up to "
        f"{longest} tokens each"
    )
    if longest < info.max_sequence_tokens:
        enough = -(-info.max_sequence_tokens // info.block_tokens) * info.block_tokens
        lines.append(
            f"  the model takes sequences of {info.max_sequence_tokens} tokens; max_tokens_in_paged_kv_cache {enough} "
            "would hold one"
        )
    return lines
