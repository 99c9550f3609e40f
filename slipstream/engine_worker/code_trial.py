"""Chooses the compiled code of the CPU, by trials in a child process.

The child compiles the code and runs it, so that a fault does not end this process. It hands the
code over, so that it is compiled once even if it cannot be kept.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.engine_worker.trials import hash_of, read_results, run_trial, write_results
from slipstream.kernels.cpu import machine, objects
from slipstream.kernels.cpu.compiler.instruction_levels import Level, possible_levels
from slipstream.weights.home import cpu_code_folder, slipstream_home

logger = logging.getLogger(__name__)


def code_command(level: Level, home: Path) -> list[str]:
    folder = str(cpu_code_folder(home))
    return [sys.executable, "-P", "-m", "slipstream.kernels.cpu.trial", level.name, folder]


def choose_code(
    command: Callable[[Level, Path], Sequence[str]] = code_command,
    cpu: tuple[str, frozenset[str]] | None = None,
    home: Path | None = None,
    progress: objects.Progress = lambda phase, done, total: None,
) -> str:
    """Return the first instruction level whose compiled code works on this machine, or "off"."""
    model, flags = cpu if cpu is not None else machine.read_cpu()
    home = home if home is not None else slipstream_home()
    limit = os.environ.get(machine.VARIABLE, machine.AUTO)
    machine.check_choice(limit)
    levels = [level for level in possible_levels(flags) if limit in (machine.AUTO, level.name)]
    if not levels:
        return machine.OFF
    results = cpu_code_folder(home) / "trials.json"
    key = hash_of([model, " ".join(sorted(flags)), objects.source_hash(), limit])
    known = read_results(results, str)
    if key in known:
        return known[key]
    chosen = _Trials(command, home, progress)
    name = next((level.name for level in levels if chosen.passes(level)), machine.OFF)
    if name == machine.OFF:
        logger.warning("no compiled code passed the CPU trial; torch computes models")
    if chosen.can_keep:
        write_results(results, {**known, key: name})
    return name


class _Trials:
    def __init__(
        self,
        command: Callable[[Level, Path], Sequence[str]],
        home: Path,
        progress: objects.Progress,
    ) -> None:
        self._command = command
        self._home = home
        self._progress = progress
        self.can_keep = True  # whether the result may be stored

    def passes(self, level: Level) -> bool:
        """Return whether the code of a level works. It is kept, or else loaded, for the engine."""
        folder = cpu_code_folder(self._home)
        compiles = not objects.has_code(level, folder)
        if compiles:
            self._progress(objects.PHASE, 0, 1)
        outcome = run_trial(self._command(level, self._home), {})
        if compiles:
            self._progress(objects.PHASE, 1, 1)
        if outcome.timed_out:  # perhaps because the machine was busy
            self.can_keep = False
        if not outcome.passed:
            return False
        if outcome.output and not objects.keep_code(level, outcome.output, folder):
            objects.install_code(level, outcome.output)
            self.can_keep = False
        return True


def explain_code(name: str) -> str:
    """Return what a choice of compiled code means in a few words."""
    limit = os.environ.get(machine.VARIABLE)
    cause = f" ({machine.VARIABLE}={limit})" if limit else ""
    if name == machine.OFF:
        return f"none, torch computes models{cause}"
    return f"{name}, which passed a trial{cause}"
