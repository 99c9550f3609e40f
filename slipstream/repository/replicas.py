"""The replicas of an engine model: `instance_group` and the parameter `gpu_device_ids`.

    instance_group [ { count: 2 kind: KIND_CPU } ]
    parameters { key: "gpu_device_ids" value { string_value: "0;1" } }

As in TensorRT-LLM, `;` separates the GPUs of different instances and `,` those of one instance.
"""

from __future__ import annotations

from typing import Any

from slipstream.engine.settings import MAX_REPLICAS, replicas_problem
from slipstream.repository.config import ModelConfig
from slipstream.repository.problems import Problems

_INSTANCES = "instance_group"
_DEVICES = "parameters.gpu_device_ids"


def replica_settings(
    config: ModelConfig, gpu_device_ids: str | None, problems: Problems
) -> dict[str, Any]:
    """Return the settings `replicas` and `devices`. Mistakes are reported, and have no effect."""
    replicas = sum(_count(group.count, group.gpus) for group in config.instance_groups) or 1
    if replicas > MAX_REPLICAS:
        text = f"{replicas} instances: an engine model may have 1 to {MAX_REPLICAS}"
        problems.error(config.file, config.line(_INSTANCES), _INSTANCES, text)
        return {}
    if gpu_device_ids is None:
        devices = _listed_devices(config)
        if problem := replicas_problem(replicas, devices):
            problems.error(config.file, config.line(_INSTANCES), _INSTANCES, problem)
            return {}
        return {"replicas": replicas, "devices": devices}
    try:
        devices = read_device_sets(gpu_device_ids, replicas)
    except ValueError as error:
        problems.error(config.file, config.line(_DEVICES), _DEVICES, str(error))
        return {}
    return {"replicas": replicas, "devices": devices}


def _count(count: int, gpus: tuple[int, ...]) -> int:
    """Return the instances of a group. As in Triton, there are `count` on each listed GPU."""
    return max(count, 1) * max(len(gpus), 1)


def _listed_devices(config: ModelConfig) -> tuple[int, ...]:
    """Return the GPUs that the groups list, one for each instance; none if a group lists none."""
    groups = config.instance_groups
    if not all(group.gpus for group in groups):
        return ()
    return tuple(gpu for group in groups for gpu in group.gpus for _ in range(max(group.count, 1)))


def read_device_sets(text: str, replicas: int) -> tuple[int, ...]:
    """Return the GPUs of all instances in order. Raises ValueError."""
    sets = [_read_set(part, text) for part in text.split(";")]
    if len(sets) != replicas:
        given = "1 set" if len(sets) == 1 else f"{len(sets)} sets"
        wanted = "1 instance" if replicas == 1 else f"{replicas} instances"
        raise ValueError(
            f"'{text}' has {given} of GPUs, but {_INSTANCES} has {wanted}: give one set for each "
            "instance, separated by ';', or change the count"
        )
    if len({len(one) for one in sets}) > 1:
        raise ValueError(f"'{text}': give each instance the same number of GPUs")
    devices = tuple(device for one in sets for device in one)
    problem = replicas_problem(replicas, devices)
    if problem:
        raise ValueError(f"'{text}': {problem}")
    return devices


def _read_set(part: str, text: str) -> list[int]:
    words = [word.strip() for word in part.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= 4 for word in words):
        raise ValueError(
            f"expected GPU numbers, with ';' between instances and ',' within one, such as "
            f"'0;1', got '{text}'"
        )
    devices = [int(word) for word in words]
    if len(set(devices)) < len(devices):
        raise ValueError(f"'{text}': an instance names the same GPU twice")
    return devices
