"""How long the queue before an engine may get, how long a request may wait in it, and what goes
first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from slipstream.engine.messages import EngineInfo
from slipstream.repository.config import QueuePolicy
from slipstream.repository.models import EngineModel
from slipstream.server.kserve.errors import InferenceError, QueueFull
from slipstream.server.kserve.inference import InferRequest

QUEUE_FULL = "Exceeds maximum queue size"
TIMED_OUT = "Request timeout expired"
# level of requests that bring none, where the configuration says nothing: 1 goes before them, 3
# after
USUAL = 2
LEAST_URGENT = 2**32 - 1  # priority levels beyond it are alike


class Engine(Protocol):
    info: EngineInfo | None


@dataclass(frozen=True)
class Urgency:
    priority: int  # for the engine: higher goes first
    deadline: float | None  # on time.monotonic()'s clock


def check_queue(request: InferRequest, count: int, model: EngineModel, engine: Engine) -> None:
    """Refuse what would make the queue longer than the model's configuration allows."""
    most = model.queue_policy.max_queue_size
    # an engine in the same process has no queue before it
    outstanding = getattr(engine, "outstanding", None)
    if not most or engine.info is None or outstanding is None:
        return
    waiting = max(0, outstanding - engine.info.max_rows)
    if waiting + count > most and outstanding + count > engine.info.max_rows:
        raise QueueFull(f"[request id: {request.id or '<id_unknown>'}] {QUEUE_FULL}")


def urgency(request: InferRequest, model: EngineModel) -> Urgency:
    """A client's timeout bounds its whole request; the policy's default bounds those that bring
    none.
    """
    given = _whole_number(request, "timeout", request.timeout_microseconds)
    policy, default = model.queue_policy, model.queue_policy.default_timeout_microseconds
    microseconds = _timeout(policy, given, default)
    deadline = time.monotonic() + microseconds / 1e6 if microseconds else None
    wanted = _whole_number(request, "priority", request.priority)
    level = level_of(wanted, model.priority_levels, model.default_priority)
    return Urgency(-min(level, LEAST_URGENT), deadline)


def level_of(given: int, levels: int, default: int) -> int:
    """What a request's priority comes to, of so many levels (0: any): the lower goes first."""
    if levels and given > levels:
        given = 0  # as Triton has it
    return given or default or USUAL


def _timeout(policy: QueuePolicy, given: int, default: int) -> int:
    if policy.timeout_action == "DELAY":
        default = 0  # a late request is served after the others, never refused
    if default and given and not policy.allow_timeout_override:
        return default
    return given or default


def _whole_number(request: InferRequest, name: str, given: int) -> int:
    """`given`: the request's own field; in a generate request it is one parameter among the others."""
    value = given or request.parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise InferenceError(f"{name} must be an integer of 0 or more, got {value!r}")
    return value
