"""The models that OpenAI's clients can name: text models, and the adapters of their engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.repository.templates import BLS_TEMPLATE, ENSEMBLE, helpers_among
from slipstream.server.engine_link.engine import AdapterUse
from slipstream.server.kserve.inference import ModelRegistry, ModelVersion
from slipstream.server.models.text_model import TextModel, find_text_model, find_text_models
from slipstream.server.openai.errors import ApiError
from slipstream.server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenAIModel:
    """A text model or an adapter, by the name that requests use as `model`."""

    id: str
    entry: ModelVersion
    text: TextModel
    is_adapter: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.engine.generator.tokenizer

    @property
    def vocab_size(self) -> int:
        info = self.text.engine.generator.client.info
        return self.tokenizer.vocab_size if info is None else info.vocab_size

    @property
    def longest_prompt(self) -> int:
        """Return the most tokens of a prompt. One generated token must fit behind it."""
        info = self.text.engine.generator.client.info
        limit = self.text.engine.model.engine_config.build.max_input_len
        return limit if info is None else min(limit, info.max_sequence_tokens - 1)

    @property
    def context_tokens(self) -> int:
        """Return the most tokens of a prompt and its answer together."""
        info = self.text.engine.generator.client.info
        limit = self.text.engine.model.engine_config.build.max_seq_len
        return limit if info is None else info.max_sequence_tokens

    def adapter(self) -> AdapterUse | None:
        return self.text.engine.adapters.find(self.id) if self.is_adapter else None

    def document(self, created: int) -> dict[str, Any]:
        parent = {"parent": self.entry.name} if self.is_adapter else {}
        return {
            "id": self.id,
            "object": "model",
            "created": created,
            "owned_by": "slipstream",
            **parent,
        }


def text_models(registry: ModelRegistry) -> list[OpenAIModel]:
    """Return the text models, without adapters and without the ensembles of imported models.

    Models with the names of the tutorials' repositories come last: clients that choose the first
    model get one with a name that a user gave.
    """
    engines = {entry.name: text.engine.model.name for entry, text in find_text_models(registry)}
    models = [
        OpenAIModel(entry.name, entry, text)
        for entry, text in find_text_models(registry)
        if not _is_helper(entry.name, engines)
    ]
    return sorted(models, key=lambda model: model.id in (ENSEMBLE, BLS_TEMPLATE))


def _is_helper(name: str, engines: Mapping[str, str]) -> bool:
    """Return whether a model is the ensemble that `slipstream import` writes beside another one.

    engines: name of each text model → name of its engine model
    """
    whole = name.removesuffix(f"-{ENSEMBLE}")
    return whole != name and engines.get(whole) == engines[name]


async def list_models(registry: ModelRegistry) -> list[OpenAIModel]:
    """Return the text models and adapters, each name once.

    A model hides an adapter of the same name. An adapter belongs to the first model that has it.
    """
    models = text_models(registry)
    taken = {entry.name for entry in registry}
    registries = {model.text.engine.adapters for model in models}
    # There may be thousands of folders to read.
    listed = await asyncio.to_thread(lambda: {found: found.names() for found in registries})
    adapters: dict[str, OpenAIModel] = {}
    for model in models:
        for name in listed[model.text.engine.adapters]:
            if name not in taken:
                adapters.setdefault(
                    name, OpenAIModel(name, model.entry, model.text, is_adapter=True)
                )
    return [*models, *adapters.values()]


async def find_model(registry: ModelRegistry, name: str) -> OpenAIModel:
    """Return the model or adapter of this name. Lists all of them only for the error message."""
    if name not in registry:
        for model in text_models(registry):
            if model.text.engine.adapters.has(name):
                return OpenAIModel(name, model.entry, model.text, is_adapter=True)
    elif (found := find_text_model(registry, name)) is not None:
        return OpenAIModel(name, *found)
    known = _known(await list_models(registry))
    raise ApiError(
        f"The model '{name[:200]}' does not exist or is not a text model. Known: {known}",
        "model",
        404,
        "model_not_found",
    )


async def find_model_or_default(registry: ModelRegistry, name: str | None) -> OpenAIModel:
    """Return the model of this name. Without a name, return the model of the only engine."""
    if name is not None:
        return await find_model(registry, name)
    models = text_models(registry)
    engines = {id(model.text.engine.generator.client) for model in models}
    if len(engines) == 1:
        return models[0]
    known = _known(models)
    raise ApiError(f"model is required: this server has several. Known: {known}", "model")


def _known(models: Sequence[OpenAIModel]) -> str:
    """Return the names of models for an error, without the helpers of others."""
    names = [model.id for model in models]
    helpers = helpers_among([model.id for model in models if not model.is_adapter])
    return ", ".join(name for name in names if name not in helpers) or "none"
