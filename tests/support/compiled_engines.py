"""Starts engines that run compiled CPU code or torch, and reads their logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cpu_steps import best_level

from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.cpu.runner import CpuRunner, Steps, new_cache
from slipstream.engine.loop import EngineLoop
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.engine.with_torch.runner import Runner
from slipstream.kernels.cpu.objects import load_code
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.kernels.stored import Weight
from slipstream.model.spec import ModelSpec

BLOCK = 16
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


def logits_of_rank(
    spec: ModelSpec,
    weights: Mapping[str, Weight],
    tokens: list[int],
    steps: Sequence[int],
    ranks: Ranks = ALONE,
    dtype: str = "float32",
) -> np.ndarray:
    """Return the logits at every position of a prompt that is computed in steps of these numbers of
    tokens. spec, weights: those of the rank
    """
    model = CpuModel(spec, weights, dtype, len(tokens), ranks=ranks)
    blocks = list(range(1, 2 + len(tokens) // BLOCK))
    cache = new_cache(model, (1 + len(blocks)) * BLOCK)
    computed = Steps(model, load_code(best_level(), None), 1, cache)
    rows = Rows(1, len(tokens) + 1, len(blocks))
    start = RowStart(0, tokens, len(tokens), blocks, SamplingParams(max_tokens=1))
    found = []
    position = 0
    for number, count in enumerate(steps):
        starts = [] if number else [start]
        plan = StepPlan(number, starts, rows=[0], positions=[position], counts=[count])
        rows.apply(plan)
        computed.reserve(count)
        computed.fill(plan, np.array([position]), np.array([count]), rows, BLOCK)
        computed.run(np.arange(count), count, None)
        found.append(computed.logits(count).copy())
        position += count
    computed.team.close()
    return np.concatenate(found)
