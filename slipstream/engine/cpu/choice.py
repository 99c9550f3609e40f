"""Chooses between compiled code and torch for a model on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.cpu.support import unsupported
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.levels import Level
from slipstream.kernels.cpu.objects import Code, Progress, load_code
from slipstream.model.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuPath:
    level: Level | None  # None: torch computes
    reason: str  # why torch computes

    def load(self, folder: Path | None, progress: Progress) -> Code:
        assert self.level is not None
        return load_code(self.level, folder, progress)


def choose_path(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    choice: str,
    dtype: torch.dtype,
    ranks: int,
) -> CpuPath:
    """Return how a model is computed. choice: the setting `cpu_code`"""
    level, reason = machine.choose_level(choice)
    if level is not None:
        quantised = any(name.endswith(".scales") for name in tensors)
        reason = unsupported(spec, str(dtype).removeprefix("torch."), ranks, quantised)
    if reason:
        logger.info("torch computes this model on the CPU: %s", reason)
        return CpuPath(None, reason)
    return CpuPath(level, "")
