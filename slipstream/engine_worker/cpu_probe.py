"""Chooses the number format and the compiled code of the CPU, by trials in a child process.

Some machines report instructions that fault when used, such as virtual machines that hide half of
AMX. The fault is a SIGILL, which no `except` can catch. A child process therefore runs a few matrix
multiplications in the format and with the instruction limit in question, and its exit code tells
whether they work. The result is stored under $SLIPSTREAM_HOME for each CPU, its flags and the
version of torch or of the compiled code, so that only the first start runs the trials.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from slipstream.engine.settings import EngineSettings
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.levels import Level, possible_levels
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.kernels.cpu.objects import source_hash
from slipstream.weights.home import cpu_code_folder, slipstream_home

logger = logging.getLogger(__name__)
Stored = TypeVar("Stored")

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
TIME_LIMIT_SECONDS = 60.0
NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is ARM's name for it


@dataclass(frozen=True)
class CpuChoice:
    """A number format, and the instruction set that oneDNN is limited to ("" for no limit)."""

    dtype: str
    isa: str = ""


# The best comes first. Below AVX512_CORE_BF16, oneDNN emulates bfloat16: float32 is faster.
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


def code_command(level: Level, home: Path) -> list[str]:
    folder = str(cpu_code_folder(home))
    return [sys.executable, "-P", "-m", "slipstream.kernels.cpu.trial", level.name, folder]


def prepare(settings: EngineSettings) -> EngineSettings:
    """Return the settings with device, format and code chosen if the engine runs on a CPU, and set
    the environment variables for them.

    Must be called before torch is imported.
    """
    if not runs_on_cpu(settings):
        return settings
    settings = replace(settings, device="cpu")
    _limit_spinning()
    if settings.cpu_code == machine.AUTO:
        settings = replace(settings, cpu_code=choose_code())
    if settings.dtype != "auto":
        return settings
    choice = choose()
    if choice.isa:
        os.environ[ISA_VARIABLE] = choice.isa
    return replace(settings, dtype=choice.dtype)


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
    known = _read_cache(cache, lambda value: CpuChoice(**value))
    if key in known:
        return known[key]
    logger.info("testing number formats of the CPU, at the first start only")
    choice = _try_candidates(command, flags)
    _write_cache(cache, {name: asdict(one) for name, one in (known | {key: choice}).items()})
    return choice


def choose_code(
    command: Callable[[Level, Path], Sequence[str]] = code_command,
    cpu: tuple[str, frozenset[str]] | None = None,
    home: Path | None = None,
) -> str:
    """Return the first instruction level whose compiled code works on this machine, or "off"."""
    model, flags = cpu if cpu is not None else read_cpu()
    home = home if home is not None else slipstream_home()
    limit = os.environ.get(machine.VARIABLE, machine.AUTO)
    machine.check_choice(limit)
    levels = [level for level in possible_levels(flags) if limit in (machine.AUTO, level.name)]
    if not levels:
        return machine.OFF
    cache = cpu_code_folder(home) / "trials.json"
    key = _hash([model, " ".join(sorted(flags)), source_hash(), limit])
    known = _read_cache(cache, str)
    if key not in known:
        logger.info("compiling and testing CPU kernels, at the first start only")
        began = time.monotonic()
        known[key] = next(
            (level.name for level in levels if _works(command(level, home), {})), machine.OFF
        )
        logger.info("CPU kernels: %s, after %.1f s", known[key], time.monotonic() - began)
        if known[key] == machine.OFF:
            logger.warning("no compiled code passed the CPU trial; torch computes models")
        _write_cache(cache, {key: known[key]})
    return known[key]


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


def explain_code(name: str) -> str:
    """Return what a choice of compiled code means in a few words."""
    limit = os.environ.get(machine.VARIABLE)
    cause = f" ({machine.VARIABLE}={limit})" if limit else ""
    if name == machine.OFF:
        return f"none, torch computes models{cause}"
    return f"{name}, which passed a trial{cause}"


def _try_candidates(
    command: Callable[[CpuChoice], Sequence[str]], flags: frozenset[str]
) -> CpuChoice:
    limited_by_user = ISA_VARIABLE in os.environ
    for choice in CANDIDATES:
        if choice.dtype == "bfloat16" and not flags & NATIVE_BF16_FLAGS:
            continue
        if choice.isa and limited_by_user:
            continue
        if _works(command(choice), {ISA_VARIABLE: choice.isa} if choice.isa else {}):
            return choice
    logger.warning("no number format passed the CPU trial; using float32")
    return CpuChoice("float32")


def _works(command: Sequence[str], variables: dict[str, str]) -> bool:
    try:
        trial = subprocess.run(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIME_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return trial.returncode == 0


def _cache_key(model: str, flags: frozenset[str]) -> str:
    parts = [model, " ".join(sorted(flags)), importlib.metadata.version("torch")]
    parts.append(os.environ.get(ISA_VARIABLE, ""))
    return _hash(parts)


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_cache(path: Path, parse: Callable[..., Stored]) -> dict[str, Stored]:
    try:
        return {key: parse(value) for key, value in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("cannot read %s (%s); the CPU trial runs again", path, error)
        return {}


def _write_cache(path: Path, values: Mapping[str, object]) -> None:
    text = json.dumps(values, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning(
            "cannot write the result of the CPU trial to %s (%s); the next start runs it again",
            path,
            error,
        )
