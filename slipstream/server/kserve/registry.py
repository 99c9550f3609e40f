"""The models of the server by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from slipstream.repository.config import TensorConfig
from slipstream.repository.describe import config_document
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ServedModel


class ModelVersion(NamedTuple):
    name: str
    version: str
    model: ServedModel


Wrapper = Callable[[ModelVersion], ServedModel]


class ModelRegistry:
    def __init__(self) -> None:
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._retired: set[str] = set()  # names of models that were unloaded or failed to load
        self._wrappers: list[Wrapper] = []

    def add(self, name: str, version: int, model: ServedModel) -> None:
        self._models.setdefault(name, {})[version] = self._wrapped(name, version, model)

    def replace(self, name: str, versions: Mapping[int, ServedModel]) -> None:
        """Replace all versions of a model at once: requests see the old ones or the new ones."""
        wrapped = {
            version: self._wrapped(name, version, model) for version, model in versions.items()
        }
        self._models[name] = wrapped

    def retire(self, name: str) -> None:
        """Remove a model, or note that one failed to load: it has no available versions."""
        self._models.pop(name, None)
        self._retired.add(name)

    def __iter__(self) -> Iterator[ModelVersion]:
        for name, versions in sorted(self._models.items()):
            for version, model in sorted(versions.items()):
                yield ModelVersion(name, str(version), model)

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap every model, for example with a counter, also those that are added later."""
        self._wrappers.append(wrapper)
        for entry in list(self):
            self._models[entry.name][int(entry.version)] = wrapper(entry)

    def _wrapped(self, name: str, version: int, model: ServedModel) -> ServedModel:
        for wrapper in self._wrappers:
            model = wrapper(ModelVersion(name, str(version), model))
        return model

    def find(self, name: str, version: str = "") -> ModelVersion:
        """Return the model in this version, or the latest. Raises InferenceError."""
        versions = self._models.get(name)
        if versions is None:
            what = "has no available versions" if name in self._retired else "is not found"
            raise InferenceError(f"Request for unknown model: '{name}' {what}", Code.NOT_FOUND)
        if not version:
            latest = max(versions)
            return ModelVersion(name, str(latest), versions[latest])
        model = versions.get(int(version)) if len(version) < 20 else None
        if model is None:
            raise InferenceError(
                f"Request for unknown model: '{name}' version {version} is not found",
                Code.NOT_FOUND,
            )
        return ModelVersion(name, str(int(version)), model)

    def is_ready(self, name: str, version: str = "") -> bool:
        try:
            return self.find(name, version).model.ready
        except InferenceError:
            return False  # an unknown model is not ready

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        entry = self.find(name, version)
        config = entry.model.config
        batch = (-1,) if config.max_batch_size > 0 else ()
        return {
            "name": name,
            "versions": [str(number) for number in sorted(self._models[name])],
            "platform": config.platform or config.backend,
            "inputs": [_tensor(tensor, batch) for tensor in config.inputs],
            "outputs": [_tensor(tensor, batch) for tensor in config.outputs],
        }

    def configuration(self, name: str, version: str = "") -> dict[str, Any]:
        entry = self.find(name, version)
        return config_document(entry.model.config, entry.model.decoupled)


def _tensor(tensor: TensorConfig, batch: tuple[int, ...]) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [*batch, *tensor.dims]}
