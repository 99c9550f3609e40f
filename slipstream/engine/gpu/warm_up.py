"""Runs every kind of step once before the engine serves, and captures CUDA graphs.

Kernels are compiled, libraries load theirs and memory is taken now, because each would delay all
requests.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from slipstream.engine.gpu.graphs import batch_sizes
from slipstream.engine.gpu.runner import GpuRunner
from slipstream.engine.loop import Progress, warm_up
from slipstream.kernels.gpu.compilation.jobs import CompileJob, collect_jobs, fix_cache_keys
from slipstream.kernels.gpu.compilation.pool import CompilePool
from slipstream.kernels.gpu.prefill_tiles import LARGE_TILES_FROM
from slipstream.kernels.ranks import ALONE, Ranks

# tokens of each prompt in a warm-up step with the full budget; more where there are few rows
_WARM_UP_TOKENS = 1024


class Measured(NamedTuple):
    """Measurements of the warm-up."""

    step_bytes: int  # GPU memory of a step with the full budget
    graph_bytes: int  # GPU memory of captured steps
    tokens_per_second: float  # of prompts, in a step with the full budget


def _ignore(job: CompileJob) -> None:
    """Do nothing with a kernel that another rank compiles."""


class GpuWarmUp:
    def __init__(
        self,
        runner: GpuRunner,
        max_rows: int,
        step_tokens: int,
        longest: int,
        blocks: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """longest: tokens of the longest sequence; blocks: of the KV cache"""
        fix_cache_keys()
        self._ranks = ranks
        self._runner = runner
        self._max_rows = max_rows
        self._step_tokens = step_tokens
        self._longest = longest
        self._blocks = blocks

    def compile_kernels(self, compiler: CompilePool | None, progress: Progress) -> None:
        """Compile the kernels of all steps in parallel processes. This process loads them from
        Triton's cache when it launches them.

        The compiler of the leading rank compiles for all ranks. The others have none, but the sums
        of the steps need all ranks.
        """
        leads = compiler is not None or self._ranks.rank > 0
        if not self._ranks.least(int(leads)):
            return
        with collect_jobs(compiler.submit if compiler is not None else _ignore):
            self._run_long_prompts()  # their kernels take longest to compile
            self._run_first_step()
            self._run_full_step()
            self._runner.run_captured_steps(self._max_rows)
        if compiler is not None:
            compiler.wait(lambda done, total: progress("compiling kernels", done, total))
        self._ranks.meet()

    def run(self, progress: Progress) -> Measured:
        """Run a step of each kind, and capture CUDA graphs."""
        self._run_first_step()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._run_full_step()
        step_bytes = torch.cuda.max_memory_allocated() - held
        self._run_long_prompts()
        self._run_prompts()
        tokens_per_second = self._ranks.least(round(self._time_full_step()))
        free, _ = torch.cuda.mem_get_info()
        self._runner.capture(
            self._max_rows,
            self._step_tokens,
            lambda done, total: progress("capturing decode steps", done, total),
            self._ranks.least(round(self._time_launch() * tokens_per_second)),
        )
        graph_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        return Measured(step_bytes, graph_bytes, tokens_per_second)

    def _warm_up(self, tokens: int = 16, requests: int = 1, steps: int = 1, output: int = 2) -> int:
        vocab_size = self._runner.model.spec.vocab_size
        return warm_up(
            self._runner, vocab_size, self._blocks, self._longest, tokens, requests, steps, output
        )

    def _run_first_step(self, output: int = 2) -> None:
        self._runner.model.prepare_gates()
        self._warm_up(output=output)

    def _run_full_step(self, output: int = 2) -> int:
        """Run a step with the full budget; return its prompt tokens. output: tokens to generate"""
        budget = self._step_tokens
        tokens = max(_WARM_UP_TOKENS, -(-budget // self._max_rows))
        each = max(1, min(self._longest - 2, budget, tokens))
        prompts = max(1, min(budget // each, self._max_rows))
        return self._warm_up(each, prompts, output=output)

    def _time_full_step(self) -> float:
        """Return the prompt tokens per second of a step with the full budget. Its kernels have run
        before.
        """
        torch.cuda.synchronize()
        began = time.perf_counter()
        tokens = self._run_full_step(output=1)
        return tokens / (time.perf_counter() - began)

    def _time_launch(self) -> float:
        """Return the seconds that the host takes to launch a step without a graph: the time of a
        step with few tokens, which takes the GPU less.
        """
        seconds = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._run_first_step(output=1)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def _run_long_prompts(self) -> None:
        """Run long prompts, and prompts of several steps, which have kernels of their own."""
        self._run_one_prompt(_WARM_UP_TOKENS)
        if self._longest - 2 >= LARGE_TILES_FROM:
            self._run_one_prompt(LARGE_TILES_FROM)

    def _run_one_prompt(self, tokens: int) -> None:
        self._warm_up(tokens)
        self._warm_up(tokens, steps=2)

    def _run_prompts(self) -> None:
        """Run prompts of many lengths. The library loads its kernels when they are first used."""
        for tokens in batch_sizes(self._max_rows):
            self._warm_up(2 * tokens, output=1)
