"""Applies the result of a model's `auto_complete_config` to its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.repository.config import DynamicBatching, ModelConfig, TensorConfig
from slipstream.repository.sequences import sequence_batching
from slipstream.server.kserve.errors import InferenceError

_INPUT = {
    "format": "FORMAT_NONE",
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}
_OUTPUT = {"label_filename": "", "is_shape_tensor": False, "is_non_linear_format_io": False}
_BATCHING = {
    "preferred_batch_size": [],
    "max_queue_delay_microseconds": 0,
    "preserve_ordering": False,
    "priority_levels": 0,
    "default_priority_level": 0,
    "priority_queue_policy": {},
}


def complete_config(config: ModelConfig, document: dict[str, Any]) -> ModelConfig:
    """Return the configuration with the model's changes.

    A model may change its tensors, batch size, dynamic batching and transaction policy.
    """
    inputs = [_with_defaults(tensor, _INPUT) for tensor in document.get("input", ())]
    outputs = [_with_defaults(tensor, _OUTPUT) for tensor in document.get("output", ())]
    policy = document.get("model_transaction_policy", {})
    changed = {
        "input": inputs,
        "output": outputs,
        "max_batch_size": document.get("max_batch_size", 0),
    }
    batching = config.dynamic_batching
    if batching is None and "dynamic_batching" in document:
        batching = DynamicBatching()
        changed["dynamic_batching"] = dict(_BATCHING)
    if policy:
        changed["model_transaction_policy"] = policy
    return replace(
        config,
        inputs=_tensors(inputs, config.inputs),
        outputs=_tensors(outputs, config.outputs),
        max_batch_size=changed["max_batch_size"],
        dynamic_batching=batching,
        decoupled=bool(policy.get("decoupled", config.decoupled)),
        document={**config.document, **changed},
        sequence_batching=sequence_batching({**config.document, **changed}),
    )


def _with_defaults(tensor: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for field in ("name", "data_type", "dims"):
        if not tensor.get(field):
            raise InferenceError(f"auto_complete_config gave a tensor without {field}")
    return {"name": tensor["name"], "data_type": tensor["data_type"], **defaults, **tensor}


def _tensors(
    described: list[dict[str, Any]], known: tuple[TensorConfig, ...]
) -> tuple[TensorConfig, ...]:
    names = {tensor.name: tensor for tensor in known}
    return tuple(
        names.get(tensor["name"])
        or TensorConfig(
            tensor["name"],
            tensor["data_type"],
            tuple(tensor["dims"]),
            optional=tensor.get("optional", False),
        )
        for tensor in described
    )
