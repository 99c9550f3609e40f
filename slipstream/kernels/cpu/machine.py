"""This machine's CPU, and the instruction level that its code is compiled for."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME, Level, possible_levels

VARIABLE = "SLIPSTREAM_CPU_CODE"
AUTO = "auto"
OFF = "off"


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Return the model name and flags of the first CPU; empty if they are not reported."""
    model = ""
    flags: frozenset[str] = frozenset()
    if not path.exists():
        return model, flags
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part") and not model:
            model = value.strip()
        elif name.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model, flags


def check_choice(choice: str) -> None:
    """Raise ValueError unless it is a value of the setting `cpu_code`."""
    if choice not in (AUTO, OFF, *BY_NAME):
        names = ", ".join(BY_NAME)
        raise ValueError(f"cpu_code must be {AUTO}, {OFF} or one of {names}, not {choice!r}")


def choose_level(choice: str, flags: frozenset[str] | None = None) -> tuple[Level | None, str]:
    """Return the instruction level for the setting `cpu_code`, and the reason if there is none.

    The environment variable takes the place of the value "auto".
    """
    if choice == AUTO:
        choice = os.environ.get(VARIABLE, AUTO)
    check_choice(choice)
    if choice == OFF:
        return None, "it is switched off"
    possible = possible_levels(read_cpu()[1] if flags is None else flags)
    for level in possible:
        if choice in (AUTO, level.name):
            return level, ""
    if choice == AUTO:
        return None, "there is no code for the instructions of this CPU"
    return None, f"this CPU lacks instructions of {choice}"
