"""Build the served models of a repository, each by its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.repository.models import Repository, RepositoryModel
from slipstream.repository.roles import Role, is_gpt_repository
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.models.ensemble import EnsembleModel
from slipstream.server.models.generating import ServedEngine
from slipstream.server.models.step_models import PostprocessingModel, PreprocessingModel
from slipstream.server.models.text_model import TextModel
from slipstream.server.models.token_model import FixedBatchModel, TokenModel
from slipstream.server.text.pipeline import TextGenerator


def build_registry(
    repository: Repository,
    generators: Mapping[str, TextGenerator],
    others: Mapping[str, Callable[[RepositoryModel, int], ServedModel]] | None = None,
    adapter_folder: Path | None = None,
) -> ModelRegistry:
    """Return a registry with every model of a repository.

    `generators`: by the name of the engine model. `others` create the models that the repository
    has as `served_elsewhere`, one for each version.
    """
    registry = ModelRegistry()
    engines = {
        name: ServedEngine(repository.engines[name], generator, AdapterRegistry(adapter_folder))
        for name, generator in generators.items()
    }
    for model in repository.models.values():
        for version in model.versions:
            if others is not None and model.name in others:
                registry.add(model.name, version, others[model.name](model, version))
            else:
                registry.add(
                    model.name,
                    version,
                    served_model(repository, model, engines.__getitem__, registry),
                )
    return registry


def served_model(
    repository: Repository,
    model: RepositoryModel,
    find_engine: Callable[[str], ServedEngine],
    registry: ModelRegistry,
) -> ServedModel:
    """Return a model by its role. An ensemble finds its steps in the registry at each request."""
    if model.name in repository.graphs:
        return EnsembleModel(model.config, registry.find)
    if model.name in repository.pipelines:
        pipeline = repository.pipelines[model.name]
        draft = find_engine(pipeline.draft_engine) if pipeline.draft_engine else None
        return TextModel(model, pipeline, find_engine(pipeline.engine), draft)
    name = engine_name(repository, model)
    engine = find_engine(name)
    if model.role is Role.PREPROCESSING:
        return PreprocessingModel(model, engine)
    if model.role is Role.POSTPROCESSING:
        return PostprocessingModel(model, engine)
    if is_gpt_repository(model.config):
        return FixedBatchModel(model, engine, placeholders=False)
    pipelines = [one for one in repository.pipelines.values() if one.engine == name]
    return TokenModel(model, engine, all(pipeline.placeholders for pipeline in pipelines))


def engine_names(repository: Repository, model: RepositoryModel) -> list[str]:
    """Return the names of the engines that a model uses."""
    if model.name in repository.graphs:
        return []
    pipeline = repository.pipelines.get(model.name)
    if pipeline is None:
        return [engine_name(repository, model)]
    return [pipeline.engine, *([pipeline.draft_engine] if pipeline.draft_engine else [])]


def engine_name(repository: Repository, model: RepositoryModel) -> str:
    """Return the engine of a model: itself, or the one in the same ensemble, or the first."""
    if model.name in repository.engines:
        return model.name
    for other in repository.models.values():
        steps = [step.model_name for step in other.config.ensemble_steps]
        engine = next((name for name in steps if name in repository.engines), None)
        if engine is not None and model.name in steps:
            return engine
    engine = next(iter(repository.engines), None)
    if engine is None:
        raise InferenceError(f"model '{model.name}' has no engine model beside it", Code.INTERNAL)
    return engine
