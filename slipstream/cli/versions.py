"""The first line that the old tools print, which scripts wait for."""

from __future__ import annotations

from slipstream.version import VERSION

NEWEST_ERA = "0.18.0"  # of the old tools, whose flags and files are understood


def print_version_line() -> None:
    print(
        f"[TensorRT-LLM] TensorRT-LLM version: {NEWEST_ERA} (Slipstream {VERSION} in its place)",
        flush=True,
    )
