"""How dear a request's blocks of the KV cache are to be, from the fields that say it:
`retention_…`.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.engine.cache.retention import Keep, KeptRange, Retention
from slipstream.server.fields.limits import FieldValue
from slipstream.server.kserve.errors import InferenceError

_RANGES = "retention_token_range_"
_UNSET = -1
_MOST_RANGES = 64  # each is looked at for every block


def retention_of(fields: Mapping[str, FieldValue]) -> Retention | None:
    """None where nothing is said."""
    starts, ends, priorities, durations = (
        _numbers(fields, f"{_RANGES}{name}")
        for name in ("starts", "ends", "priorities", "durations_ms")
    )
    durations = durations or [_UNSET] * len(starts)
    if not len(starts) == len(ends) == len(priorities) == len(durations):
        counts = f"{len(starts)}, {len(ends)}, {len(priorities)} and {len(durations)}"
        raise InferenceError(
            f"{_RANGES}starts, ends, priorities and durations_ms must be of one length, got {counts}"
        )
    if len(starts) > _MOST_RANGES:
        raise InferenceError(
            f"{_RANGES}starts must hold at most {_MOST_RANGES} ranges, got {len(starts)}"
        )
    ranges = []
    for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True):
        if end != _UNSET and end <= start:
            raise InferenceError(
                f"{_RANGES}ends must be over {_RANGES}starts, got {end} and {start}"
            )
        ranges.append(KeptRange(start, None if end == _UNSET else end, _keep(priority, duration)))
    answer = _answer(fields)
    return Retention(tuple(ranges), answer) if ranges or answer is not None else None


def _answer(fields: Mapping[str, FieldValue]) -> Keep | None:
    priority, duration = (
        _numbers(fields, f"retention_decode_{name}") for name in ("priority", "duration_ms")
    )
    if duration and not priority:
        raise InferenceError("retention_decode_duration_ms needs retention_decode_priority")
    return _keep(priority[0], duration[0] if duration else _UNSET) if priority else None


def _numbers(fields: Mapping[str, FieldValue], field: str) -> list[int]:
    return fields[field].tensor.values() if field in fields else []


def _keep(priority: int, duration: int) -> Keep:
    return Keep(priority, None if duration == _UNSET else duration)
