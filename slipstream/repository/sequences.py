"""Read and check `sequence_batching`: settings and control tensors of stateful Python models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.repository.schema import FileReading

USUAL_IDLE_MICROSECONDS = 1_000_000  # Triton's default
START, END, READY, IDENTITY = (
    f"CONTROL_SEQUENCE_{kind}" for kind in ("START", "END", "READY", "CORRID")
)
_PAIRS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_IDENTITIES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_NOT_SUPPORTED = {
    "state": "a Python model stores its own state",
    "iterative_sequence": "a model receives each request once",
}
_ONE_BY_ONE = "without oldest, requests are executed one by one"
_AS_THEY_COME = "requests are executed as soon as an instance is free"
_NO_EFFECT = {
    ("direct", "max_queue_delay_microseconds"): _AS_THEY_COME,
    ("direct", "minimum_slot_utilization"): _AS_THEY_COME,
    ("oldest", "max_queue_delay_microseconds"): _AS_THEY_COME,
    ("oldest", "preferred_batch_size"): "a batch holds all requests that are waiting",
    ("oldest", "preserve_ordering"): "responses are sent as soon as they are ready",
}


@dataclass(frozen=True)
class Control:
    """A tensor that the server adds to each request of a sequence."""

    name: str
    kind: str
    datatype: str  # type in KServe's notation, such as INT32
    false_true: tuple[Any, ...] = ()  # the values for false and true; empty for a correlation id


@dataclass(frozen=True)
class SequenceBatching:
    idle_microseconds: int  # time without a request after which a sequence ends
    sequences: int  # largest number of active sequences of an instance
    together: int  # largest number of requests in one execution, each of another sequence
    controls: tuple[Control, ...]


def sequence_batching(document: dict[str, Any]) -> SequenceBatching | None:
    """Return the settings of a Python model's sequences, or None for any other model."""
    given = document.get("sequence_batching")
    if given is None or document["backend"] != "python":
        return None
    oldest = given.get("oldest")
    rows = max(1, document["max_batch_size"])
    return SequenceBatching(
        idle_microseconds=given["max_sequence_idle_microseconds"] or USUAL_IDLE_MICROSECONDS,
        sequences=(max(0, oldest["max_candidate_sequences"]) if oldest else 0) or rows,
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
    """Report errors in `sequence_batching`, and its settings that have no effect."""
    given = document.get("sequence_batching")
    if given is not None:
        _check_strategy(document, given, reading)
        _check_controls(document, given, reading)


def _error(reading: FileReading, key: str, text: str) -> None:
    reading.problems.error(reading.file, reading.lines.get(key, 0), key, text)


def _warn_no_effect(reading: FileReading, key: str, why: str) -> None:
    reading.problems.warn(reading.file, reading.lines.get(key, 0), key, f"has no effect: {why}")


def _check_strategy(document: dict[str, Any], given: dict[str, Any], reading: FileReading) -> None:
    for other in ("dynamic_batching", "ensemble_scheduling"):
        if other in document:
            _error(reading, "sequence_batching", f"cannot be given together with {other}")
    if "direct" in given and "oldest" in given:
        _error(reading, "sequence_batching.oldest", "cannot be given together with direct")
    if document["backend"] != "python":
        _warn_no_effect(
            reading, "sequence_batching", "only Python models keep state between requests"
        )
    for name, why in _NOT_SUPPORTED.items():
        if given[name]:
            _error(reading, f"sequence_batching.{name}", f"is not supported: {why}")
    for (strategy, name), why in _NO_EFFECT.items():
        if given.get(strategy, {}).get(name):
            _warn_no_effect(reading, f"sequence_batching.{strategy}.{name}", why)


def _check_controls(document: dict[str, Any], given: dict[str, Any], reading: FileReading) -> None:
    one_by_one = document["max_batch_size"] > 1 and "oldest" not in given
    kinds: set[str] = set()
    for position, tensor in enumerate(given["control_input"]):
        key = f"sequence_batching.control_input[{position}]"
        if not tensor["name"] or len(tensor["control"]) != 1:
            _error(reading, key, "must have a name and one control")
        else:
            control = tensor["control"][0]
            if control["kind"] in kinds:
                _error(reading, key, f"{control['kind']} is given more than once")
            kinds.add(control["kind"])
            _check_control(control, key, reading)
        if kinds and one_by_one and _has_kind(tensor, READY):
            _warn_no_effect(reading, key, f"{_ONE_BY_ONE}, and each of them is ready")


def _has_kind(tensor: dict[str, Any], kind: str) -> bool:
    return any(control["kind"] == kind for control in tensor["control"])


def _check_control(control: dict[str, Any], key: str, reading: FileReading) -> None:
    kind = control["kind"]
    pairs = [field for field in _PAIRS if control[field]]
    if kind == IDENTITY:
        if pairs or control["data_type"] not in _IDENTITIES:
            text = f"{kind} must have a data_type of {', '.join(_IDENTITIES)}, and nothing else"
            _error(reading, key, text)
    elif len(pairs) != 1 or len(control[pairs[0]]) != 2:
        _error(reading, key, f"{kind} must have one of {', '.join(_PAIRS)}, with two values")
