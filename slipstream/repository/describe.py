"""A model's configuration as `/config` returns it: the file's fields and the server's defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.repository.config import InstanceGroup, ModelConfig
from slipstream.repository.schema import MESSAGES
from slipstream.repository.sequences import USUAL_IDLE_MICROSECONDS


def config_document(config: ModelConfig, decoupled: bool) -> dict[str, Any]:
    filled = dict(config.document)
    filled.setdefault("version_policy", {"latest": {"num_versions": 1}})
    if sequences := filled.get("sequence_batching"):
        idle = sequences["max_sequence_idle_microseconds"] or USUAL_IDLE_MICROSECONDS
        filled["sequence_batching"] = {**sequences, "max_sequence_idle_microseconds": idle}
    if (batching := filled.get("dynamic_batching")) and not batching["preferred_batch_size"]:
        sizes = [max(1, config.max_batch_size)]
        filled["dynamic_batching"] = {**batching, "preferred_batch_size": sizes}
    if decoupled:
        filled["model_transaction_policy"] = {"decoupled": True}
    if not config.is_ensemble:
        filled["optimization"] = _optimization(filled.get("optimization", {}))
        filled["instance_group"] = _instance_groups(config, filled["instance_group"])
        if config.backend == "python" and not filled["default_model_filename"]:
            filled["default_model_filename"] = "model.py"
    return {name: filled[name] for name in MESSAGES["ModelConfig"] if name in filled}


def with_instances(config: ModelConfig, count: int) -> ModelConfig:
    """Return the configuration with one group of this many instances."""
    group = {**config_document(config, config.decoupled)["instance_group"][0], "count": count}
    groups = (InstanceGroup(group["name"], group["kind"], count),)
    document = {**config.document, "instance_group": [{**group, "gpus": []}]}
    return replace(config, instance_groups=groups, document=document)


def _optimization(given: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }
    merged = {**defaults, **given}
    return {name: merged[name] for name in MESSAGES["Optimization"] if name in merged}


def _instance_groups(config: ModelConfig, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    empty = {
        "name": "",
        "kind": "KIND_CPU",
        "count": 1,
        "gpus": [],
        "secondary_devices": [],
        "profile": [],
        "passive": False,
        "host_policy": "",
    }
    if not groups:
        return [{**empty, "name": config.name}]
    named = []
    for position, group in enumerate(groups):
        kind = (
            "KIND_CPU"
            if config.backend == "python" and group["kind"] == "KIND_AUTO"
            else group["kind"]
        )
        name = group["name"] or f"{config.name}_{position}"
        named.append({**group, "name": name, "kind": kind, "count": group["count"] or 1})
    return named
