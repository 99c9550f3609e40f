"""Chooses how a CPU computes a model: with compiled code or torch, and in which number format.

Compiled code computes in bfloat16 with float32 sums, whatever instructions the CPU has. For torch,
trials in a child process decide.

Some machines report instructions that fault when used, such as virtual machines that hide half of
AMX. The fault is a SIGILL, which no `except` can catch. A child process therefore runs a few matrix
multiplications in the format and with the instruction limit in question, and its exit code tells
whether they work. The result is stored under $SLIPSTREAM_HOME for each CPU, its flags and the
version of torch or of the compiled code, so that only the first start runs the trials.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.nodes import bind_replica, place_replica, usable_nodes
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.code_trial import choose_code
from slipstream.engine_worker.progress import show_progress
from slipstream.engine_worker.trials import hash_of, read_results, run_trial, write_results
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.model.spec import ModelSpec
from slipstream.weights.home import slipstream_home

logger = logging.getLogger(__name__)

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is ARM's name for it
# What a virtual machine may hide half of. torch computes adapters even where code is compiled.
_DOUBTFUL_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})


@dataclass(frozen=True)
class CpuChoice:
    """A number format, and the instruction set that oneDNN is limited to ("" for no limit)."""

    dtype: str
    isa: str = ""


# What torch may compute in, the best first. Below AVX512_CORE_BF16, oneDNN emulates bfloat16:
# float32 is faster.
CANDIDATES = (
    CpuChoice("bfloat16"),
    CpuChoice("bfloat16", "AVX512_CORE_BF16"),
    CpuChoice("float32"),
    CpuChoice("float32", "AVX512_CORE"),
    CpuChoice("float32", "AVX2"),
)

# oneDNN has different kernels for one row, a few rows and many rows. Attention has its own.
TRIAL = """
import sys, torch
import torch.nn.functional as F
dtype = getattr(torch, sys.argv[1])
weight = torch.randn(96, 64)
for rows in (1, 7, 64):
    given = torch.randn(rows, 64)
    found = F.linear(given.to(dtype), weight.to(dtype)).float()
    assert torch.allclose(found, F.linear(given, weight), atol=0.5, rtol=0.05), "wrong result"
heads = torch.randn(1, 4, 33, 16).to(dtype)
assert torch.isfinite(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)).all()
"""


def trial_command(choice: CpuChoice) -> list[str]:
    return [sys.executable, "-P", "-c", TRIAL, choice.dtype]


def prepare(settings: EngineSettings, spec: ModelSpec | None) -> EngineSettings:
    """Return the settings with device, format and code chosen if the engine runs on a CPU, and set
    the environment variables for them.

    Must be called before torch is imported. spec: of the whole model; None: torch computes it
    """
    if not runs_on_cpu(settings):
        return settings
    # imported here: they load numpy, which the server does without
    from slipstream.engine.cpu.path import COMPILED_DTYPE, choose_path
    from slipstream.weights.shards import rank_spec

    settings = replace(settings, device="cpu")
    _limit_spinning()
    if settings.cpu_code == machine.AUTO:
        settings = replace(settings, cpu_code=choose_code(progress=show_progress))
    if settings.dtype != "auto":
        return settings
    _, flags = read_cpu()
    compiled = False
    if spec is not None:
        part = rank_spec(spec, settings.ranks or 1)
        compiled = choose_path(part, settings.cpu_code).level is not None
    if compiled and not flags & _DOUBTFUL_FLAGS:
        return replace(settings, dtype=COMPILED_DTYPE)
    choice = choose()
    if choice.isa:
        os.environ[ISA_VARIABLE] = choice.isa
    return replace(settings, dtype=COMPILED_DTYPE if compiled else choice.dtype)


def bind_to_node(settings: EngineSettings) -> EngineSettings:
    """Keep this process on a NUMA node if it is a replica on a CPU of several nodes. Return the
    settings with its threads.

    Must be called before the process has other threads or much memory.
    """
    if settings.replicas < 2 or not runs_on_cpu(settings):
        return settings
    place = place_replica(settings, usable_nodes(), usable_cores())
    if place is None:
        return settings
    bind_replica(place)
    return replace(settings, threads=place.threads)


def _limit_spinning() -> None:
    """Limit how long torch's OpenMP threads spin while they wait for each other.

    They spin for milliseconds by default. When another process needs a core, as the server does for
    each token, a thread spins while the thread it waits for cannot run, and steps take thirty times
    as long. A thousand iterations cover the gap between two kernels.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def runs_on_cpu(settings: EngineSettings) -> bool:
    if settings.device != "auto":
        return settings.device == "cpu"
    return (
        importlib.metadata.version("torch").endswith("+cpu") or not Path("/dev/nvidiactl").exists()
    )


def choose(
    command: Callable[[CpuChoice], Sequence[str]] = trial_command,
    cpu: tuple[str, frozenset[str]] | None = None,
    home: Path | None = None,
) -> CpuChoice:
    """Return the first candidate that works on this machine, from the cache if it is known."""
    model, flags = cpu if cpu is not None else read_cpu()
    key = _cache_key(model, flags)
    cache = (home if home is not None else slipstream_home()) / "cpu-probe.json"
    known = read_results(cache, lambda value: CpuChoice(**value))
    if key in known:
        return known[key]
    logger.info("testing number formats of the CPU, at the first start only")
    choice = _try_candidates(command, flags)
    write_results(cache, {name: asdict(one) for name, one in (known | {key: choice}).items()})
    return choice


def explain(choice: CpuChoice, flags: frozenset[str]) -> str:
    """Return the reason for a choice in a few words."""
    if ISA_VARIABLE in os.environ:
        return f"what works within {ISA_VARIABLE}={os.environ[ISA_VARIABLE]}"
    native = sorted(flags & NATIVE_BF16_FLAGS)
    if choice.isa:
        return f"limited to {choice.isa}, because what the CPU reports beyond it failed a trial"
    if choice.dtype == "bfloat16":
        return f"the CPU has instructions for it ({', '.join(native)}), and they passed a trial"
    if native:
        names = ", ".join(native)
        return f"the CPU reports instructions for bfloat16 ({names}), but they failed a trial"
    return "the CPU has no instructions for bfloat16"


def _try_candidates(
    command: Callable[[CpuChoice], Sequence[str]], flags: frozenset[str]
) -> CpuChoice:
    limited_by_user = ISA_VARIABLE in os.environ
    for choice in CANDIDATES:
        if choice.dtype == "bfloat16" and not flags & NATIVE_BF16_FLAGS:
            continue
        if choice.isa and limited_by_user:
            continue
        if run_trial(command(choice), {ISA_VARIABLE: choice.isa} if choice.isa else {}).passed:
            return choice
    logger.warning("no number format passed the CPU trial; using float32")
    return CpuChoice("float32")


def _cache_key(model: str, flags: frozenset[str]) -> str:
    parts = [model, " ".join(sorted(flags)), importlib.metadata.version("torch")]
    parts.append(os.environ.get(ISA_VARIABLE, ""))
    return hash_of(parts)
