"""Runs engines over tiny or real folders in the test's own process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.engine.loop import EngineLoop, LaunchedStep
from slipstream.engine.messages import Beam
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.kernels import invariant_attention
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.options import KernelOptions
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Step, Transformer
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.load import start_engine

BLOCK = 16
# Enough for all requests of a test at once. The default of 512 MiB takes longer to clear than most
# tests run.
CACHE_TOKENS = 16384


class Answers(dict[int, list[int]]):
    """Tokens by request id, with the finish reasons and the other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[int, str] = {}
        self.log_probs: dict[int, list[float]] = {}
        self.top_log_probs: dict[int, list[list[tuple[int, float]]]] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.beams: dict[int, list[Beam]] = {}


def run_all(loop: EngineLoop, requests: list[GenerateRequest]) -> Answers:
    answers = Answers()
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        tokens = iter(outputs.tokens)
        log_probs = iter(outputs.log_probs)
        for request_id, count, reason, cached in zip(
            outputs.request_ids,
            outputs.token_counts,
            outputs.finish_reasons,
            outputs.cached_tokens,
            strict=True,
        ):
            answers.setdefault(request_id, []).extend(itertools.islice(tokens, count))
            answers.log_probs.setdefault(request_id, []).extend(itertools.islice(log_probs, count))
            answers.cached[request_id] = cached
            if reason:
                answers.reasons[request_id] = reason
        for request_id, tops in outputs.top_log_probs.items():
            answers.top_log_probs.setdefault(request_id, []).extend(tops)
        answers.errors.update(outputs.errors)
        answers.beams.update(outputs.beams)
    loop.check_integrity()
    assert loop.stats().free_blocks == loop.stats().total_blocks
    return answers


def generate(loop: EngineLoop, prompts: list[list[int]], **sampling) -> list[list[int]]:
    parameters = SamplingParams(**sampling)
    answers = run_all(
        loop, [GenerateRequest(i, prompt, parameters) for i, prompt in enumerate(prompts)]
    )
    return [answers[i] for i in range(len(prompts))]


def engine(
    folder: Path, dtype: str = "float32", cache_tokens: int = CACHE_TOKENS, **settings
) -> EngineLoop:
    return start_engine(folder, EngineSettings(dtype=dtype, cache_tokens=cache_tokens, **settings))


def record_plans(loop: EngineLoop) -> list[StepPlan]:
    """Return a list that grows by each plan that the engine carries out."""
    plans: list[StepPlan] = []
    launch = loop.runner.launch

    def launch_and_record(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        return launch(plan)

    loop.runner.launch = launch_and_record  # type: ignore[method-assign]
    return plans


def all_logits(folder: Path, dtype: torch.dtype, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits at every position of every sequence: [tokens, vocab] each."""
    opened = read_engine_folder(folder)
    return logits_of(opened.spec, opened.tensors(), dtype, sequences)


def logits_of(
    spec: ModelSpec,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    sequences: list[list[int]],
    ranks: Ranks = ALONE,
) -> list[torch.Tensor]:
    longest = max(map(len, sequences))
    model = Transformer(spec, tensors, dtype, torch.device("cpu"), positions=longest, ranks=ranks)
    blocks = -(-longest // BLOCK)
    found = []
    for sequence in sequences:
        cache = model.new_cache((blocks + 1) * BLOCK)
        tables = np.arange(1, blocks + 1, dtype=np.int32)[None]
        count = len(sequence)
        slots = torch.arange(BLOCK, BLOCK + count)
        attention = plan_attention(tables, np.array([0]), np.array([count]), BLOCK, cache)
        step = Step(torch.tensor(sequence), torch.arange(count), slots, attention, samples=None)
        with torch.inference_mode():
            found.append(model(step, cache))
    return found


def logits_in_steps(
    spec: ModelSpec,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    sequence: list[int],
    steps: Sequence[int],
    options: KernelOptions = KernelOptions(),
) -> torch.Tensor:
    """Return the same for one sequence that is computed in steps of these numbers of tokens."""
    device = torch.device("cpu")
    model = Transformer(spec, tensors, dtype, device, positions=len(sequence), options=options)
    plan = invariant_attention.plan_attention if options.deterministic else plan_attention
    blocks = -(-len(sequence) // BLOCK)
    cache = model.new_cache((blocks + 1) * BLOCK)
    tables = np.arange(1, blocks + 1, dtype=np.int32)[None]
    found = []
    start = 0
    for count in steps:
        positions = torch.arange(start, start + count)
        attention = plan(tables, np.array([start]), np.array([count]), BLOCK, cache)
        tokens = torch.tensor(sequence[start : start + count])
        step = Step(tokens, positions, BLOCK + positions, attention, samples=None)
        with torch.inference_mode():
            found.append(model(step, cache))
        start += count
    return torch.cat(found)


def greedy_choices(model, sequences: list[list[int]]) -> list[list[int]]:
    """Return the tokens that a transformers model chooses after every prefix of every sequence."""
    with torch.inference_mode():
        return [
            model(torch.tensor([sequence])).logits[0].argmax(-1).tolist() for sequence in sequences
        ]
