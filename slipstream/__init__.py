"""Slipstream: an LLM inference server that speaks Triton + TensorRT-LLM.

`slipstream.LLM` is loaded on first use, because it imports torch and the server process must not.
"""

from typing import TYPE_CHECKING, Any

from slipstream.version import VERSION as __version__

if TYPE_CHECKING:
    from slipstream.llm import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from slipstream.llm import LLM

        return LLM
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
