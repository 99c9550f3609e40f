"""Runs operations of compiled CPU code on arrays of a test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.memory import aligned
from slipstream.kernels.cpu.objects import load_code
from slipstream.kernels.cpu.operations import Entry, encode
from slipstream.kernels.cpu.records import Context
from slipstream.kernels.cpu.team import Team

ROW_BYTES = 1 << 18


def best_level() -> Level:
    level, reason = machine.choose_level(machine.AUTO)
    assert level is not None, reason
    return level


def new_team(threads: int, level: Level | None = None) -> Team:
    return Team(load_code(level or best_level(), None), threads, ROW_BYTES)


def run(
    team: Team,
    entries: Sequence[Entry],
    tokens: int,
    samples: int | None = None,
    **fields: int | np.ndarray,
) -> None:
    """Run operations as one step. fields: of the context, by their names in lower case"""
    program = encode(entries)
    context = aligned(8 * Context.SIZE).view(np.int64)
    context[Context.PROGRAM] = program.ctypes.data
    context[Context.OPERATIONS] = len(program)
    context[Context.TOKENS] = tokens
    context[Context.SAMPLES] = context[Context.LOGITS] = tokens if samples is None else samples
    context[Context.PRIVATE] = int(tokens == 1)
    for name, value in fields.items():
        number = value if isinstance(value, int) else int(value.ctypes.data)
        context[Context[name.upper()]] = number
    team.run(int(context.ctypes.data))


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def as_bf16(numbers: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to bfloat16, as uint16."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy()


def from_bf16(numbers: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers as float32."""
    return torch.from_numpy(numbers).view(torch.bfloat16).float().numpy()
