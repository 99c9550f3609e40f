"""What `sequence_batching` of a Python model asks for: requests that belong together, and tensors
that say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.repository.schema import FileReading

USUAL_IDLE_MICROSECONDS = 1_000_000  # Triton's
START, END, READY, IDENTITY = (
    f"CONTROL_SEQUENCE_{kind}" for kind in ("START", "END", "READY", "CORRID")
)
_PAIRS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_IDENTITIES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_NOT_SUPPORTED = {
    "state": "a Python model keeps its state itself",
    "iterative_sequence": "a request is given to its model once",
}
_ONE_BY_ONE = "without oldest, requests are executed one by one"
_AS_THEY_COME = "requests are executed as soon as an instance is free"
_NO_EFFECT = {
    ("direct", "max_queue_delay_microseconds"): _AS_THEY_COME,
    ("direct", "minimum_slot_utilization"): _AS_THEY_COME,
    ("oldest", "max_queue_delay_microseconds"): _AS_THEY_COME,
    ("oldest", "preferred_batch_size"): "as many go together as wait",
    ("oldest", "preserve_ordering"): "answers are sent as they are ready",
}


@dataclass(frozen=True)
class Control:
    """A tensor that the server adds to each request of a sequence."""

    name: str
    kind: str
    datatype: str  # as the wire says it
    false_true: tuple[Any, ...] = ()  # of all but the identity


@dataclass(frozen=True)
class SequenceBatching:
    idle_microseconds: int  # after which a sequence is given up
    sequences: int  # that an instance works on at once
    together: int  # requests of different sequences that may be executed at once
    controls: tuple[Control, ...]


def sequence_batching(document: dict[str, Any]) -> SequenceBatching | None:
    given = document.get("sequence_batching")
    if given is None or document["backend"] != "python":
        return None
    oldest = given.get("oldest")
    rows = max(1, document["max_batch_size"])
    return SequenceBatching(
        idle_microseconds=given["max_sequence_idle_microseconds"] or USUAL_IDLE_MICROSECONDS,
        sequences=max(0, oldest["max_candidate_sequences"]) or rows if oldest else rows,
        together=rows if oldest else 1,
        controls=tuple(
            _control(tensor["name"], control)
            for tensor in given["control_input"]
            for control in tensor["control"]
        ),
    )


def _control(name: str, control: dict[str, Any]) -> Control:
    if control["kind"] == IDENTITY:
        datatype = control["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        return Control(name, IDENTITY, datatype)
    pairs = [(datatype, control[field]) for field, datatype in _PAIRS.items() if control[field]]
    datatype, false_true = pairs[0] if pairs else ("", ())
    return Control(name, control["kind"], datatype, tuple(false_true))


def check_sequences(document: dict[str, Any], reading: FileReading) -> None:
    given = document.get("sequence_batching")
    if given is None:
        return

    def error(key: str, text: str) -> None:
        reading.problems.error(reading.file, reading.lines.get(key, 0), key, text)

    def no_effect(key: str, why: str) -> None:
        reading.problems.warn(reading.file, reading.lines.get(key, 0), key, f"has no effect: {why}")

    for other in ("dynamic_batching", "ensemble_scheduling"):
        if other in document:
            error("sequence_batching", f"cannot be given together with {other}")
    if "direct" in given and "oldest" in given:
        error("sequence_batching.oldest", "cannot be given together with direct")
    if document["backend"] != "python":
        no_effect(
            "sequence_batching", "only Python models keep something from one request to the next"
        )
    for name, why in _NOT_SUPPORTED.items():
        if given[name]:
            error(f"sequence_batching.{name}", f"is not supported: {why}")
    for (strategy, name), why in _NO_EFFECT.items():
        if given.get(strategy, {}).get(name):
            no_effect(f"sequence_batching.{strategy}.{name}", why)
    kinds: set[str] = set()
    for place, tensor in enumerate(given["control_input"]):
        key = f"sequence_batching.control_input[{place}]"
        for problem in _problems(tensor, kinds):
            error(key, problem)
        if (
            kinds
            and document["max_batch_size"] > 1
            and "oldest" not in given
            and _has(tensor, READY)
        ):
            no_effect(key, f"{_ONE_BY_ONE}, and each of them is ready")


def _has(tensor: dict[str, Any], kind: str) -> bool:
    return any(control["kind"] == kind for control in tensor["control"])


def _problems(tensor: dict[str, Any], kinds: set[str]) -> list[str]:
    """kinds: those of the tensors before it; its own are added"""
    if not tensor["name"] or len(tensor["control"]) != 1:
        return ["must have a name and one control"]
    (control,) = tensor["control"]
    kind = control["kind"]
    pairs = [field for field in _PAIRS if control[field]]
    found = []
    if kind in kinds:
        found.append(f"{kind} is given more than once")
    kinds.add(kind)
    if kind == IDENTITY and (pairs or control["data_type"] not in _IDENTITIES):
        found.append(f"{kind} must have a data_type of {', '.join(_IDENTITIES)}, and nothing else")
    if kind != IDENTITY and (len(pairs) != 1 or len(control[pairs[0]]) != 2):
        found.append(f"{kind} must have one of {', '.join(_PAIRS)}, with two values")
    return found
