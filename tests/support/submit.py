"""Submit a prompt to an engine."""

from __future__ import annotations

from typing import Any

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import UNASSIGNED, Engine, InFlight


def submit(engine: Engine, prompt: list[int], sampling: SamplingParams, **fields: Any) -> InFlight:
    """`fields`: further fields of GenerateRequest."""
    return engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling, **fields))
