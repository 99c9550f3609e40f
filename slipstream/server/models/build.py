"""Build the served models of a repository, each by its role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.repository.models import EngineModel, Repository, RepositoryModel, TextPipeline
from slipstream.repository.roles import Role, is_gpt_repository
from slipstream.server.engine_link.engine import Engine
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.models.ensemble import EnsembleModel
from slipstream.server.models.generating import ServedEngine
from slipstream.server.models.step_models import PostprocessingModel, PreprocessingModel
from slipstream.server.models.text_model import TextModel
from slipstream.server.models.token_model import FixedBatchModel, TokenModel
from slipstream.server.text.chat import ChatOptions
from slipstream.server.text.folder import read_tokenizer_folder
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer


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
                recipe = write_recipe(repository, model)
                served = served_model(recipe, engines.__getitem__, registry)
                registry.add(model.name, version, served)
    return registry


@dataclass(frozen=True)
class Recipe:
    """The recipe of a model of a known role, as plain data that another process can use, too."""

    model: RepositoryModel
    kind: Literal["graph", "text", "before", "after", "tokens", "blocks"]
    engine: str = ""  # name of its engine model
    pipeline: TextPipeline | None = None  # of a text model
    placeholders: bool = True  # whether outputs not requested are sent; of a model of tokens


def write_recipe(repository: Repository, model: RepositoryModel) -> Recipe:
    """Return how to build a model, by its role."""
    if model.name in repository.graphs:
        return Recipe(model, "graph")
    if model.name in repository.pipelines:
        pipeline = repository.pipelines[model.name]
        return Recipe(model, "text", pipeline.engine, pipeline)
    name = engine_name(repository, model)
    if model.role is Role.PREPROCESSING:
        return Recipe(model, "before", name)
    if model.role is Role.POSTPROCESSING:
        return Recipe(model, "after", name)
    if is_gpt_repository(model.config):
        return Recipe(model, "blocks", name, placeholders=False)
    pipelines = [one for one in repository.pipelines.values() if one.engine == name]
    placeholders = all(pipeline.placeholders for pipeline in pipelines)
    return Recipe(model, "tokens", name, placeholders=placeholders)


def served_model(
    recipe: Recipe, find_engine: Callable[[str], ServedEngine], registry: ModelRegistry
) -> ServedModel:
    """Return a model. An ensemble finds its steps in the registry at each request."""
    if recipe.kind == "graph":
        return EnsembleModel(recipe.model.config, registry.find)
    engine = find_engine(recipe.engine)
    if recipe.pipeline is not None:
        draft = recipe.pipeline.draft_engine
        return TextModel(
            recipe.model, recipe.pipeline, engine, find_engine(draft) if draft else None
        )
    if recipe.kind == "before":
        return PreprocessingModel(recipe.model, engine)
    if recipe.kind == "after":
        return PostprocessingModel(recipe.model, engine)
    if recipe.kind == "blocks":
        return FixedBatchModel(recipe.model, engine, recipe.placeholders)
    return TokenModel(recipe.model, engine, recipe.placeholders)


async def load_engine(
    model: EngineModel, client: Engine, chat: ChatOptions, adapters: AdapterRegistry
) -> ServedEngine:
    """Return an engine with its tokenizer, which is read in a thread: its file may be large."""
    tokenizer = await asyncio.to_thread(Tokenizer.load, model.tokenizer_folder)
    if chat.template_folder is not None:
        tokenizer.chat_templates = read_tokenizer_folder(chat.template_folder).chat_templates
    return ServedEngine(model, TextGenerator(tokenizer, client), adapters, chat)


def engine_names(recipe: Recipe) -> list[str]:
    """Return the names of the engines that a model uses."""
    draft = recipe.pipeline.draft_engine if recipe.pipeline is not None else ""
    return [name for name in (recipe.engine, draft) if name]


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
