"""Starts engines that run compiled CPU code or torch, and reads their logits."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.loop import EngineLoop
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.engine.with_torch.runner import Runner
from slipstream.model.spec import ModelSpec

LONGEST = 128
Model = tuple[ModelSpec, dict[str, torch.Tensor]]


def _start(model: Model, dtype: str, **settings) -> EngineLoop:
    spec, tensors = model
    chosen = {"cache_tokens": 2048, "block_tokens": 16, **settings}
    return create_engine(
        spec, dict(tensors), EngineSettings(dtype=dtype, device="cpu", **chosen), LONGEST
    )


def start_compiled(model: Model, dtype: str = "float32", **settings) -> EngineLoop:
    """Return an engine that runs compiled code."""
    loop = _start(model, dtype, **settings)
    assert isinstance(loop.runner, CpuRunner)
    return loop


def start_torch(model: Model, dtype: str = "float32", **settings) -> EngineLoop:
    """Return an engine that computes with torch."""
    loop = _start(model, dtype, cpu_code="off", **settings)
    assert isinstance(loop.runner, Runner)
    return loop


def context_logits(loop: EngineLoop, tokens: list[int], vocabulary: int) -> np.ndarray:
    """Return the logits at every position of a prompt: [tokens, vocabulary]."""
    sampling = SamplingParams(max_tokens=1, context_logits=True)
    loop.submit(GenerateRequest(0, tokens, sampling))
    found = []
    while loop.has_work():
        outputs = loop.step()
        for scores in outputs.scores.values() if outputs is not None else ():
            found.append(np.frombuffer(scores.context_logits, dtype=np.float32))
    return np.concatenate(found).reshape(-1, vocabulary)
