"""Creates the runner of compiled code for a CPU."""

from __future__ import annotations

from pathlib import Path

from slipstream.engine.cpu.model import CpuModel
from slipstream.engine.cpu.path import CpuPath
from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.loop import Progress, warm_up
from slipstream.kernels.cpu.objects import load_code


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
