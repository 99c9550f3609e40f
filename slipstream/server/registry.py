"""The models this server answers for, by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from slipstream.repository.config import TensorConfig
from slipstream.repository.describe import config_document
from slipstream.repository.models import Repository, RepositoryModel
from slipstream.repository.roles import Role
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import ServedModel
from slipstream.server.llm_models import Generator, TextModel, TokenModel
from slipstream.server.step_models import PostprocessingModel, PreprocessingModel


class ModelVersion(NamedTuple):
    name: str
    version: str
    model: ServedModel


class ModelRegistry:
    def __init__(self) -> None:
        self._models: dict[str, dict[int, ServedModel]] = {}

    def add(self, name: str, version: int, model: ServedModel) -> None:
        self._models.setdefault(name, {})[version] = model

    def __iter__(self) -> Iterator[ModelVersion]:
        for name, versions in sorted(self._models.items()):
            for version, model in sorted(versions.items()):
                yield ModelVersion(name, str(version), model)

    def wrap(self, wrapper: Callable[[ModelVersion], ServedModel]) -> None:
        """Put something around every model, for example a counter."""
        for entry in list(self):
            self._models[entry.name][int(entry.version)] = wrapper(entry)

    def find(self, name: str, version: str = "") -> ModelVersion:
        """The model, in that version or the latest; InferenceError where there is none."""
        versions = self._models.get(name)
        if versions is None:
            raise InferenceError(f"Request for unknown model: '{name}' is not found", Code.NOT_FOUND)
        if not version:
            latest = max(versions)
            return ModelVersion(name, str(latest), versions[latest])
        model = versions.get(int(version)) if len(version) < 20 else None
        if model is None:
            raise InferenceError(f"Request for unknown model: '{name}' version {version} is not found", Code.NOT_FOUND)
        return ModelVersion(name, str(int(version)), model)

    def is_ready(self, name: str, version: str = "") -> bool:
        try:
            return self.find(name, version).model.ready
        except InferenceError:
            return False  # unknown is not ready

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


def build_registry(
    repository: Repository,
    generators: Mapping[str, Generator],
    others: Mapping[str, Callable[[RepositoryModel, int], ServedModel]] | None = None,
) -> ModelRegistry:
    """Every model of a repository. `generators`: one for each engine model's name.

    `others` makes the models the repository was told are `served_elsewhere`, one for each version.
    """
    registry = ModelRegistry()
    for model in repository.models.values():
        for version in model.versions:
            if others is not None and model.name in others:
                registry.add(model.name, version, others[model.name](model, version))
            else:
                registry.add(model.name, version, _served(repository, model, generators))
    return registry


def _served(repository: Repository, model: RepositoryModel, generators: Mapping[str, Generator]) -> ServedModel:
    if model.name in repository.chains:
        chain = repository.chains[model.name]
        return TextModel(model, chain, repository.engines[chain.engine], generators[chain.engine])
    name = _engine_of(repository, model)
    engine, generator = repository.engines[name], generators[name]
    if model.role is Role.PREPROCESSING:
        return PreprocessingModel(model, engine, generator)
    if model.role is Role.POSTPROCESSING:
        return PostprocessingModel(model, engine, generator)
    chains = [chain.placeholders for chain in repository.chains.values() if chain.engine == name]
    return TokenModel(model, engine, generator, placeholders=all(chains))


def _engine_of(repository: Repository, model: RepositoryModel) -> str:
    """The engine a model belongs to: itself, or the one it shares an ensemble with, or the first."""
    if model.name in repository.engines:
        return model.name
    for chain in repository.chains.values():
        steps = repository.models[chain.name].config.ensemble_steps
        if any(step.model_name == model.name for step in steps):
            return chain.engine
    return next(iter(repository.engines))
