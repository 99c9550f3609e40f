"""The last steps of all engines, for the dashboard: which rows computed tokens in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slipstream.engine.messages import StepRecord
from slipstream.server.engine_link.client import EngineClient
from slipstream.server.engine_link.engine import Engine
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.engine_link.replicas import Replicas


def describe_steps(engines: Mapping[tuple[str, str], Engine], started_us: int) -> dict[str, Any]:
    """Return the steps of these engines that started after `started_us`, as JSON."""
    found = []
    for (model, version), engine in engines.items():
        for replica, last_steps in enumerate(_histories(engine)):
            steps = [
                [step.started_us, step.rows, step.epochs, step.counts, step.samples]
                for step in last_steps
                if step.started_us > started_us
            ]
            found.append({"model": model, "version": version, "replica": replica, "steps": steps})
    return {"engines": found}


def _histories(engine: Engine) -> Iterator[Iterable[StepRecord]]:
    """Return the last steps of each process of an engine."""
    if isinstance(engine, Replicas):
        yield from (client.last_steps for client in engine.clients)
    elif isinstance(engine, EngineClient | InProcessEngine):
        yield engine.last_steps
