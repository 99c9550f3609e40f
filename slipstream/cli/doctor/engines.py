"""How the engines of a repository compute: with compiled code, torch or a GPU."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli.doctor.report import Section
from slipstream.engine.cpu.path import COMPILED_DTYPE, choose_path
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.code_trial import choose_code
from slipstream.kernels.cpu import machine
from slipstream.model.spec import ModelSpec
from slipstream.repository.models import inspect_repository
from slipstream.weights.shards import rank_spec


def engines(repository: Path) -> Section:
    """Return what computes each engine of a repository, and why."""
    try:
        found, _ = inspect_repository(repository)
    except OSError as error:
        return Section("engines", {"found": f"the repository cannot be read: {error}"})
    facts = {
        name: describe_engine(engine.settings, engine.engine_config.spec)
        for name, engine in sorted(found.engines.items())
    }
    return Section("engines", facts or {"found": "none"})


def describe_engine(settings: EngineSettings, spec: ModelSpec) -> str:
    """Return what computes an engine, the number format, and the reason if torch computes it."""
    if not cpu_probe.runs_on_cpu(settings):
        return "GPU"
    own = settings.dtype if settings.dtype != "auto" else ""
    code = choose_code() if settings.cpu_code == machine.AUTO else settings.cpu_code
    dtype = own or COMPILED_DTYPE
    path = choose_path(rank_spec(spec, settings.ranks or 1), code, dtype, settings.cpu_code)
    if path.level is not None:
        return f"compiled code ({path.level.name}) in {dtype}"
    return f"torch in {own or cpu_probe.choose().dtype}: {path.reason}"
