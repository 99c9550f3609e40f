"""Decides between compiled code and torch for a model on a CPU. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.cpu.support import unsupported
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.model.spec import ModelSpec

COMPILED_DTYPE = "bfloat16"  # the default number format of compiled code, on every CPU
_NO_LEVEL = "no compiled code passed the trial on this CPU"


@dataclass(frozen=True)
class CpuPath:
    level: Level | None  # None: torch computes
    reason: str = ""  # why torch computes


def choose_path(
    spec: ModelSpec, code: str, dtype: str = COMPILED_DTYPE, asked: str = machine.OFF
) -> CpuPath:
    """Return how a model is computed.

    spec: of one rank's part. code: the setting `cpu_code`, or the result of its trial. asked: the
    setting, where `code` is the result
    """
    level, reason = machine.choose_level(code)
    if level is None:
        failed = code == machine.OFF and machine.choose_level(asked)[0] is not None
        return CpuPath(None, _NO_LEVEL if failed else reason)
    if reason := unsupported(spec, dtype):
        return CpuPath(None, reason)
    return CpuPath(level)
