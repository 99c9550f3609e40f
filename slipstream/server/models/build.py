"""Build the served models of a repository, each by its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.repository.models import Repository, RepositoryModel
from slipstream.repository.roles import Role, answers_in_blocks
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ServedModel
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.models.batches import BatchedModel
from slipstream.server.models.ensemble import EnsembleModel
from slipstream.server.models.fixed_batches import FixedBatchModel
from slipstream.server.models.llm_models import Generator, TextModel, TokenModel
from slipstream.server.models.step_models import PostprocessingModel, PreprocessingModel


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
                registry.add(
                    model.name,
                    version,
                    served_model(repository, model, generators.__getitem__, registry),
                )
    return registry


def served_model(
    repository: Repository,
    model: RepositoryModel,
    generator_of: Callable[[str], Generator],
    registry: ModelRegistry,
) -> ServedModel:
    """A model of a known role. An ensemble of others looks its steps up in the registry, request by
    request.
    """
    if model.name in repository.graphs:
        return EnsembleModel(model.config, registry.find)
    if model.name in repository.chains:
        chain = repository.chains[model.name]
        engine, generator = repository.engines[chain.engine], generator_of(chain.engine)
        draft = generator_of(chain.draft_engine) if chain.draft_engine else None
        return BatchedModel(TextModel(model, chain, engine, generator, draft), engine, generator)
    name = engine_of(repository, model)
    engine, generator = repository.engines[name], generator_of(name)
    if model.role is Role.PREPROCESSING:
        return BatchedModel(PreprocessingModel(model, engine, generator), engine, generator)
    if model.role is Role.POSTPROCESSING:
        return PostprocessingModel(model, engine, generator)
    chains = [chain.placeholders for chain in repository.chains.values() if chain.engine == name]
    in_blocks = answers_in_blocks(model.config)
    tokens = TokenModel(model, engine, generator, placeholders=all(chains) and not in_blocks)
    if in_blocks:
        return BatchedModel(
            FixedBatchModel(tokens, generator.tokenizer.eos_id or 0), engine, generator
        )
    return BatchedModel(tokens, engine, generator)


def engine_of(repository: Repository, model: RepositoryModel) -> str:
    """The engine a model belongs to: itself, or the one it shares an ensemble with, or the first."""
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
