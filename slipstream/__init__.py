"""Slipstream: an LLM inference server with the protocols of Triton and TensorRT-LLM.

`slipstream.LLM` and the names beside it are loaded on first use, because `LLM` imports torch and
the server process must not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.version import VERSION as __version__

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.offline.event_loop import TextStream
    from slipstream.offline.generation import GenerationFailed
    from slipstream.offline.guides import StructuredOutputsParams
    from slipstream.offline.results import Completion, Logprob, RequestOutput
    from slipstream.offline.sampling_params import SamplingParams
    from slipstream.offline.serving import LLMServer, ServerFailed

__all__ = [
    "LLM",
    "Completion",
    "GenerationFailed",
    "LLMServer",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ServerFailed",
    "StructuredOutputsParams",
    "TextStream",
    "__version__",
]

_MODULES = {
    "LLM": "slipstream.llm",
    "Completion": "slipstream.offline.results",
    "GenerationFailed": "slipstream.offline.generation",
    "LLMServer": "slipstream.offline.serving",
    "Logprob": "slipstream.offline.results",
    "RequestOutput": "slipstream.offline.results",
    "SamplingParams": "slipstream.offline.sampling_params",
    "ServerFailed": "slipstream.offline.serving",
    "StructuredOutputsParams": "slipstream.offline.guides",
    "TextStream": "slipstream.offline.event_loop",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
