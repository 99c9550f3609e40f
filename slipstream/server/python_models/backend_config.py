"""The configuration object of `auto_complete_config`. Part of `triton_python_backend_utils`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ModelConfig:
    """The model's configuration, to which the model adds what its config.pbtxt leaves out."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def as_dict(self) -> dict[str, Any]:
        return self._document

    def set_max_batch_size(self, max_batch_size: int) -> None:
        given = self._document.get("max_batch_size", 0)
        if 0 < given < max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, "
                f"but the model asks for more: {max_batch_size}"
            )
        if given == 0:
            self._document["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._document:
                raise ValueError(
                    f"configuration specified {other}, so the model cannot ask for dynamic_batching"
                )
        self._document.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        unknown = set(transaction_policy) - {"decoupled"}
        if unknown:
            raise ValueError(
                f"unknown fields of the transaction policy: {', '.join(sorted(unknown))}"
            )
        wanted = bool(transaction_policy.get("decoupled", False))
        given = self._document.get("model_transaction_policy", {}).get("decoupled")
        if given is not None and given != wanted:
            raise ValueError(
                f"configuration specified decoupled: {given}, but the model asks for {wanted}"
            )
        self._document["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def _add(self, group: str, tensor: Mapping[str, Any], fields: set[str]) -> None:
        unknown = set(tensor) - fields
        missing = {"name", "data_type", "dims"} - set(tensor)
        if unknown or missing:
            names = ", ".join(sorted(unknown | missing))
            raise ValueError(
                f"an {group} must have name, data_type and dims and no unknown fields: {names}"
            )
        existing = self._document.setdefault(group, [])
        given = next((other for other in existing if other["name"] == tensor["name"]), None)
        if given is None:
            existing.append({**tensor, "dims": [int(dim) for dim in tensor["dims"]]})
            return
        for field in ("data_type", "dims"):
            if given[field] != tensor[field]:
                raise ValueError(
                    f"configuration specified {field} {given[field]} for '{tensor['name']}', "
                    f"but the model asks for {tensor[field]}"
                )
