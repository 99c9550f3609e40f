"""Collect kernels as an engine on an H200 would launch them, compile them in other processes, and
print which of them this process then finds compiled.

    python tests/support/compile_ahead.py

Run as a separate process: the tests enable Triton's interpreter, which compiles nothing. Triton's
driver is a stand-in, so that no GPU is needed: it only says which GPU there is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from slipstream.kernels.gpu import activation, launch, step
from slipstream.kernels.gpu.compilation.jobs import collect_jobs, fix_cache_keys
from slipstream.kernels.gpu.compilation.pool import CompilePool
from slipstream.kernels.gpu.sampling.draw import draw
from slipstream.kernels.gpu.sampling.table import SamplingTable, Scratch


class Driver:
    """The answers of Triton's driver on an H200."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def run_kernels() -> list[int]:
    """Run a few kernels. The numbers of rows differ, the variants do not."""
    for rows in (4, 5, 32):
        activation.silu_gated(torch.empty(rows, 256, dtype=torch.bfloat16))
    rows = torch.zeros(3, dtype=torch.int32)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    ids, _ = step.step_inputs(rows, rows, tokens, torch.zeros(4, 2, dtype=torch.int32), 4)
    step.write_back(rows, rows, ids, tokens)
    sample_tokens()
    return ids.tolist()


def sample_tokens() -> None:
    """Run kernels that share functions with each other."""
    device = torch.device("cpu")
    table = SamplingTable.empty(3, 100, device)
    rows = torch.zeros(2, dtype=torch.int32)
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    draw(torch.zeros(2, 100), rows, rows, tokens, table, Scratch.empty(3, 100, device))


def main() -> None:
    triton.runtime.driver.set_active(Driver())  # type: ignore[arg-type]
    fix_cache_keys()
    pool = CompilePool(2)
    with collect_jobs(pool.submit):
        tokens = run_kernels()
    collected = [job.kernel for job in pool.jobs]
    pool.submit(replace(pool.jobs[0], kernel="_missing"))
    reports: list[tuple[int, int]] = []
    pool.wait(lambda done, total: reports.append((done, total)))
    cached: dict[str, bool] = {}

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        cached[src.name] = cache_hit

    triton.knobs.compilation.listener = listen
    launch.CachedKernel._launch = (  # type: ignore[method-assign]
        lambda kernel, grid, *arguments, **constants: kernel.function.warmup(
            *arguments, grid=grid, **constants
        )
    )
    run_kernels()
    found = {"collected": collected, "cached": cached, "reports": reports, "tokens": tokens}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
