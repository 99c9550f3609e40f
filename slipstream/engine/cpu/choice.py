"""Chooses between compiled code and torch for a model on a CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.cpu.support import unsupported
from slipstream.engine.loop import Progress, warm_up
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.objects import load_code
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuPath:
    level: Level | None  # None: torch computes
    reason: str  # why torch computes


def choose_path(
    spec: ModelSpec,
    choice: str,
    dtype: str,
    ranks: Ranks = ALONE,
) -> CpuPath:
    """Return how a model is computed. choice: the setting `cpu_code`"""
    level, reason = machine.choose_level(choice)
    if level is not None:
        reason = unsupported(spec, dtype)
    if reason:
        if ranks.rank == 0:  # all ranks decide alike
            logger.info("torch computes this model on the CPU: %s", reason)
        return CpuPath(None, reason)
    return CpuPath(level, "")


def create_runner(
    model: CpuModel,
    path: CpuPath,
    threads: int,
    total_blocks: int,
    block_tokens: int,
    max_rows: int,
    max_tokens: int,
    code_folder: Path | None,
    progress: Progress,
) -> CpuRunner:
    """Return the runner of compiled code, warm."""
    assert path.level is not None
    code = load_code(path.level, code_folder, progress)
    runner = CpuRunner(model, code, threads, total_blocks, block_tokens, max_rows, max_tokens)
    warm_up(runner, model.spec.vocab_size, total_blocks, max_tokens)
    return runner
