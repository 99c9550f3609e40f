"""Read a model's config.pbtxt into a frozen dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slipstream.repository.json_config import message_from_json
from slipstream.repository.pbtxt import Message, PbtxtError, parse_pbtxt
from slipstream.repository.problems import Problems
from slipstream.repository.schema import VARIABLE_DEFAULTS, FileReading
from slipstream.repository.sequences import SequenceBatching, check_sequences, sequence_batching

CONFIG_NAME = "config.pbtxt"
MAX_CONFIG_BYTES = 1 << 20  # the largest templates have 20 KB
_PLACEHOLDER = re.compile(r"\$\{([^{}\s]*)\}")
_TRUE = ("true", "1")
_FALSE = ("false", "0")


@dataclass(frozen=True)
class TensorConfig:
    name: str
    data_type: str  # type in the file's notation: TYPE_INT32, TYPE_STRING, …
    dims: tuple[int, ...]  # shape without the batch dimension
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    allow_ragged_batch: bool = False
    label_filename: str = ""  # file with the class names of an output, one per line

    @cached_property
    def datatype(self) -> str:
        """Return the type in KServe's notation: INT32, BYTES, …"""
        return "BYTES" if self.data_type == "TYPE_STRING" else self.data_type.removeprefix("TYPE_")


@dataclass(frozen=True)
class Resource:
    name: str
    count: int
    of_machine: bool  # whether all devices share one pool; otherwise each device has its own


@dataclass(frozen=True)
class InstanceGroup:
    name: str
    kind: str
    count: int
    gpus: tuple[int, ...] = ()
    resources: tuple[Resource, ...] = ()  # resources that one execution takes
    priority: int = 1  # weight of scheduling: 2 runs half as often as 1


@dataclass(frozen=True)
class QueuePolicy:
    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0  # largest number of waiting requests; 0 for no limit


@dataclass(frozen=True)
class DynamicBatching:
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0
    queue_policy: QueuePolicy = QueuePolicy()


@dataclass(frozen=True)
class EnsembleStep:
    model_name: str
    model_version: int
    input_map: Mapping[str, str]  # tensor of the step's model → tensor of the ensemble
    output_map: Mapping[str, str]


@dataclass(frozen=True)
class VersionPolicy:
    kind: Literal["latest", "all", "specific"] = "latest"
    number: int = 1  # number of versions to serve under "latest"
    versions: tuple[int, ...] = ()  # versions to serve under "specific"

    def choose(self, present: tuple[int, ...]) -> tuple[int, ...]:
        """Return the versions to serve, in ascending order."""
        if self.kind == "all":
            return tuple(sorted(present))
        if self.kind == "specific":
            return tuple(sorted(set(present) & set(self.versions)))
        return tuple(sorted(present)[-self.number :])


@dataclass(frozen=True)
class ModelConfig:
    file: Path
    name: str
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    parameters: Mapping[str, str]  # values as written; `parameter` returns None for unset ones
    instance_groups: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None
    ensemble_steps: tuple[EnsembleStep, ...]
    decoupled: bool
    version_policy: VersionPolicy
    document: Mapping[str, Any]  # the whole configuration, as `/config` returns it
    lines: Mapping[str, int] = field(repr=False, default_factory=dict)
    unfilled: frozenset[str] = frozenset()  # fields with a template variable that was not filled
    sequence_batching: SequenceBatching | None = None

    @property
    def is_ensemble(self) -> bool:
        return self.platform == "ensemble" or bool(self.ensemble_steps)

    @cached_property
    def inputs_by_name(self) -> Mapping[str, TensorConfig]:
        return {tensor.name: tensor for tensor in self.inputs}

    @cached_property
    def required_inputs(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.inputs if not tensor.optional)

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.inputs)

    @cached_property
    def output_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.outputs)

    def line(self, key: str) -> int:
        return self.lines.get(key, 0)

    def parameter(self, name: str) -> str | None:
        """Return the value, or None if it is absent, empty or an unfilled `${…}`."""
        value = self.parameters.get(name, "")
        return None if value == "" or _PLACEHOLDER.fullmatch(value) else value

    def flag(self, name: str) -> bool | None:
        """Return a boolean parameter, or None if it is not set or not a boolean."""
        value = (self.parameter(name) or "").lower()
        if value in _TRUE:
            return True
        return False if value in _FALSE else None


def read_model_config(
    folder: Path, problems: Problems, override: Mapping[str, Any] | None = None
) -> ModelConfig | None:
    """Return the config of a model folder, or of `override` if given.

    Problems are added to `problems`. Returns None if the file cannot be read or parsed.
    """
    file = folder / CONFIG_NAME
    if override is not None:
        return _read(file, message_from_json("ModelConfig", override), problems, folder.name)
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            problems.error(file, 0, "", f"larger than {MAX_CONFIG_BYTES} bytes")
            return None
        tree = parse_pbtxt(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.error(file, 0, "", f"cannot be read: {error.strerror}")
        return None
    except UnicodeDecodeError:
        problems.error(file, 0, "", "is not UTF-8 text")
        return None
    except PbtxtError as error:
        problems.error(file, error.line, "", error.text)
        return None
    return _read(file, tree, problems, folder.name)


def _read(file: Path, tree: Message, problems: Problems, folder_name: str) -> ModelConfig:
    reading = FileReading(str(file), problems)
    document = reading.message("ModelConfig", tree)
    _fill(document, reading)
    _check(document, reading, folder_name)
    return _build(file, document, reading)


def _fill(document: dict[str, Any], reading: FileReading) -> None:
    """Replace quoted `"${…}"` by the defaults of the fields that have one, and warn about each.

    The reader of parameters warns about those of parameters, as it knows which have an effect.
    """
    for key in ("name", "platform", "backend"):
        match = _PLACEHOLDER.fullmatch(document[key])
        if match:
            document[key] = VARIABLE_DEFAULTS.get(match.group(1), "")
            reading.unfilled.add(key)
            meaning = (
                f"using the default ({document[key]})" if document[key] else "using the default"
            )
            text = f"{match.group()} was not filled: {meaning}"
            reading.problems.warn(reading.file, reading.lines.get(key, 0), key, text)
    for key, parameter in document["parameters"].items():
        if _PLACEHOLDER.fullmatch(parameter["string_value"]):
            reading.unfilled.add(f"parameters.{key}")


def _check(document: dict[str, Any], reading: FileReading, folder_name: str) -> None:
    if not document["name"]:
        document["name"] = folder_name
    if document["name"] != folder_name:
        _error(
            reading,
            "name",
            f"'{document['name']}' is not the name of the model's folder, '{folder_name}'",
        )
    if document["max_batch_size"] < 0:
        _error(reading, "max_batch_size", f"must be 0 or more, not {document['max_batch_size']}")
    for group in ("input", "output"):
        seen: set[str] = set()
        for position, tensor in enumerate(document[group]):
            _check_tensor(reading, f"{group}[{position}]", tensor, seen)
    _check_batching(document, reading)
    check_sequences(document, reading)
    for position, step in enumerate(document.get("ensemble_scheduling", {}).get("step", [])):
        if not step["model_name"]:
            _error(reading, f"ensemble_scheduling.step[{position}]", "model_name is missing")


# Settings of dynamic_batching that have no effect, and why.
_NO_EFFECT = {
    "preserve_ordering": "responses are sent as soon as they are ready",
    "priority_queue_policy": "requests of every priority use the default_queue_policy",
}


def _check_batching(document: dict[str, Any], reading: FileReading) -> None:
    batching = document.get("dynamic_batching", {})
    levels = batching.get("priority_levels", 0)
    if levels and not 1 <= batching["default_priority_level"] <= levels:
        text = f"default priority level must be in range [1, {levels}] for {document['name']}"
        _error(reading, "dynamic_batching.priority_levels", text)
    for name, why in _NO_EFFECT.items():
        if batching.get(name):
            key = f"dynamic_batching.{name}"
            reading.problems.warn(
                reading.file, reading.lines.get(key, 0), key, f"has no effect: {why}"
            )


def _check_tensor(reading: FileReading, key: str, tensor: dict[str, Any], seen: set[str]) -> None:
    name = tensor["name"]
    if not name:
        _error(reading, key, "name is missing")
    elif name in seen:
        _error(reading, f"{key}.name", f"'{name}' is given more than once")
    seen.add(name)
    if tensor["data_type"] == "TYPE_INVALID" and f"{key}.data_type" not in reading.lines:
        _error(reading, key, f"data_type of '{name}' is missing")
    if not tensor["dims"]:
        _error(reading, key, f"dims of '{name}' is missing")
    for dim in tensor["dims"]:
        if dim < 1 and dim != -1:
            _error(
                reading,
                f"{key}.dims",
                f"a dimension of '{name}' must be -1 or at least 1, not {dim}",
            )


def _error(reading: FileReading, key: str, text: str) -> None:
    reading.problems.error(reading.file, reading.lines.get(key, 0), key, text)


def _build(file: Path, document: dict[str, Any], reading: FileReading) -> ModelConfig:
    batching = document.get("dynamic_batching")
    return ModelConfig(
        file=file,
        name=document["name"],
        platform=document["platform"],
        backend=document["backend"],
        max_batch_size=document["max_batch_size"],
        inputs=tuple(_tensor(tensor) for tensor in document["input"]),
        outputs=tuple(_tensor(tensor) for tensor in document["output"]),
        parameters={key: value["string_value"] for key, value in document["parameters"].items()},
        instance_groups=tuple(_instance_group(group) for group in document["instance_group"]),
        dynamic_batching=None if batching is None else _dynamic_batching(batching),
        ensemble_steps=tuple(
            EnsembleStep(
                step["model_name"], step["model_version"], step["input_map"], step["output_map"]
            )
            for step in document.get("ensemble_scheduling", {}).get("step", [])
        ),
        decoupled=document.get("model_transaction_policy", {}).get("decoupled", False),
        version_policy=_version_policy(document.get("version_policy", {})),
        document=document,
        lines=reading.lines,
        unfilled=frozenset(reading.unfilled),
        sequence_batching=sequence_batching(document),
    )


def _instance_group(group: dict[str, Any]) -> InstanceGroup:
    limiter = group.get("rate_limiter") or {}
    resources = [
        Resource(resource["name"], resource["count"], resource["global"])
        for resource in limiter.get("resources", [])
    ]
    gpus = tuple(group["gpus"])
    priority = limiter.get("priority") or 1
    return InstanceGroup(
        group["name"], group["kind"], group["count"], gpus, tuple(resources), priority
    )


def _tensor(tensor: dict[str, Any]) -> TensorConfig:
    reshape = tensor.get("reshape")
    return TensorConfig(
        name=tensor["name"],
        data_type=tensor["data_type"],
        dims=tuple(tensor["dims"]),
        reshape=None if reshape is None else tuple(reshape["shape"]),
        optional=tensor.get("optional", False),
        allow_ragged_batch=tensor.get("allow_ragged_batch", False),
        label_filename=tensor.get("label_filename", ""),
    )


def _dynamic_batching(batching: dict[str, Any]) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_size=tuple(batching["preferred_batch_size"]),
        max_queue_delay_microseconds=batching["max_queue_delay_microseconds"],
        priority_levels=batching["priority_levels"],
        default_priority_level=batching["default_priority_level"],
        queue_policy=QueuePolicy(**batching.get("default_queue_policy", {})),
    )


def _version_policy(policy: dict[str, Any]) -> VersionPolicy:
    if "all" in policy:
        return VersionPolicy("all")
    if "specific" in policy:
        return VersionPolicy("specific", versions=tuple(policy["specific"]["versions"]))
    return VersionPolicy("latest", number=max(1, policy.get("latest", {}).get("num_versions", 1)))
