"""Which number format the CPU computes well, found out where a crash hurts nobody.

Some machines report instructions that fault when they are used (virtual machines that hide half of
AMX, for one), and a fault there is a SIGILL that no `except` can catch. So a child process tries a
few matrix products in the format and under the instruction limit in question; its exit code is the
answer. The answer is kept per CPU, flags and torch version under $SLIPSTREAM_HOME, so only the
first start pays for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.engine.settings import EngineSettings
from slipstream.weights.home import slipstream_home

logger = logging.getLogger(__name__)

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
TIME_LIMIT_SECONDS = 60.0
NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is ARM's name for it


@dataclass(frozen=True)
class CpuChoice:
    dtype: str
    isa: str = ""  # the most oneDNN may use; "" means whatever it finds


# Best first. Below AVX512_CORE_BF16 the bfloat16 products would be emulated, and float32 is faster
# than that.
CANDIDATES = (
    CpuChoice("bfloat16"),
    CpuChoice("bfloat16", "AVX512_CORE_BF16"),
    CpuChoice("float32"),
    CpuChoice("float32", "AVX512_CORE"),
    CpuChoice("float32", "AVX2"),
)

# Products of one row, of a few and of many take different kernels; attention takes its own.
TRIAL = """
import sys, torch
import torch.nn.functional as F
dtype = getattr(torch, sys.argv[1])
weight = torch.randn(96, 64)
for rows in (1, 7, 64):
    given = torch.randn(rows, 64)
    found = F.linear(given.to(dtype), weight.to(dtype)).float()
    assert torch.allclose(found, F.linear(given, weight), atol=0.5, rtol=0.05), "wrong product"
heads = torch.randn(1, 4, 33, 16).to(dtype)
assert torch.isfinite(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)).all()
"""


def trial_command(choice: CpuChoice) -> list[str]:
    return [sys.executable, "-P", "-c", TRIAL, choice.dtype]


def prepare(settings: EngineSettings) -> EngineSettings:
    """Settings with the format decided, and the environment set for it. To be called before torch
    loads.
    """
    if not runs_on_cpu(settings):
        return settings
    _limit_spinning()
    if settings.dtype != "auto":
        return settings
    choice = choose()
    if choice.isa:
        os.environ[ISA_VARIABLE] = choice.isa
    return replace(settings, dtype=choice.dtype)


def _limit_spinning() -> None:
    """torch's OpenMP threads wait for each other by spinning, for milliseconds. As soon as anything
    else wants a core (the server process does, for each token) a thread spins while the one it
    waits for cannot run, and steps take thirty times as long. A thousand turns bridge the gap
    between two kernels and no more.
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
    """The first candidate that works here, from the cache where it knows this machine."""
    model, flags = cpu if cpu is not None else read_cpu()
    key = _cache_key(model, flags)
    cache = (home if home is not None else slipstream_home()) / "cpu-probe.json"
    known = _read_cache(cache)
    if key in known:
        return known[key]
    choice = _try_candidates(command, flags)
    _write_cache(cache, known | {key: choice})
    return choice


def explain(choice: CpuChoice, flags: frozenset[str]) -> str:
    """Why this one, in a few words."""
    if ISA_VARIABLE in os.environ:
        return f"what works within {ISA_VARIABLE}={os.environ[ISA_VARIABLE]}"
    native = sorted(flags & NATIVE_BF16_FLAGS)
    if choice.isa:
        return f"limited to {choice.isa}, because what the CPU reports beyond it failed a trial"
    if choice.dtype == "bfloat16":
        return f"the CPU has instructions for it ({', '.join(native)}), and they passed a trial"
    if native:
        return f"the CPU reports instructions for bfloat16 ({', '.join(native)}), but they failed a trial"
    return "the CPU has no instructions for bfloat16"


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Model name and flags of the first processor; empty where the system does not tell."""
    model, flags = "", frozenset[str]()
    if not path.exists():
        return model, flags
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part") and not model:
            model = value.strip()
        elif name.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model, flags


def _try_candidates(
    command: Callable[[CpuChoice], Sequence[str]], flags: frozenset[str]
) -> CpuChoice:
    limited_by_user = ISA_VARIABLE in os.environ
    for choice in CANDIDATES:
        if choice.dtype == "bfloat16" and not flags & NATIVE_BF16_FLAGS:
            continue
        if choice.isa and limited_by_user:
            continue
        if _works(command(choice), choice):
            return choice
    logger.warning("no number format passed the CPU trial; trying float32 all the same")
    return CpuChoice("float32")


def _works(command: Sequence[str], choice: CpuChoice) -> bool:
    environment = os.environ | ({ISA_VARIABLE: choice.isa} if choice.isa else {})
    try:
        trial = subprocess.run(
            command,
            env=environment,
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
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, CpuChoice]:
    try:
        return {key: CpuChoice(**value) for key, value in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("cannot use %s (%s); the CPU is tried again", path, error)
        return {}


def _write_cache(path: Path, choices: dict[str, CpuChoice]) -> None:
    text = json.dumps({key: asdict(choice) for key, choice in choices.items()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning(
            "cannot keep the CPU trial's result in %s (%s); the next start tries again", path, error
        )
