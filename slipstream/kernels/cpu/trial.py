"""Run the code of an instruction level in this process, which a fault then ends.

    python -P -m slipstream.kernels.cpu.trial LEVEL FOLDER

The caller reads the exit code. The compiled code is kept in FOLDER for the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from slipstream.kernels.cpu.compiler.levels import BY_NAME, Level
from slipstream.kernels.cpu.memory import aligned, aligned_rows
from slipstream.kernels.cpu.objects import load_code
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Context,
    Entry,
    Epilogue,
    Format,
    Linear,
    encode,
)
from slipstream.kernels.cpu.pack import pack
from slipstream.kernels.cpu.team import Team

_INPUTS = 64
_ROWS = 7
_BF16_ONE = 0x3F80


def run_trial(level: Level, folder: Path) -> None:
    """Compute linear layers in every format; raise ValueError if a result is wrong."""
    team = Team(load_code(level, folder), 2, 4096)
    numbers = np.arange(40 * _INPUTS, dtype=np.float32).reshape(40, _INPUTS) % 8
    halved = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    for weight, kind in ((numbers, Format.F32), (halved, Format.BF16)):
        target = aligned_rows(_ROWS, 64, np.float32)
        x = aligned_rows(_ROWS, _INPUTS, weight.dtype.type)
        x[:] = 1.0 if kind is Format.F32 else _BF16_ONE
        _run_linear(team, weight, x, target, kind)
        if not (target[:, :40] == numbers.sum(axis=1)).all():
            raise ValueError(f"{level.name}: a linear layer with {kind.name} is wrong")
    team.close()


def _run_linear(
    team: Team, weight: np.ndarray, x: np.ndarray, target: np.ndarray, kind: Format
) -> None:
    packed = pack(weight)
    operation = Linear(
        weights=packed.address,
        weight_format=packed.format,
        block_bytes=packed.block_bytes,
        blocks=packed.blocks,
        inputs=packed.inputs,
        x=x.ctypes.data,
        x_stride=x.strides[0],
        x_own=0,
        target=target.ctypes.data,
        target_stride=target.strides[0],
        epilogue=Epilogue.STORE,
        bias=0,
        format=kind,
        activation=ACTIVATIONS.index("silu"),
        second=0,
    )
    program = encode([Entry(operation)])
    context = aligned(8 * Context.SIZE).view(np.int64)
    context[Context.PROGRAM] = program.ctypes.data
    context[Context.OPERATIONS] = 1
    context[Context.TOKENS] = _ROWS
    team.run(int(context.ctypes.data))


if __name__ == "__main__":
    run_trial(BY_NAME[sys.argv[1]], Path(sys.argv[2]))
