"""The life of each model of a repository: it is built, takes its place, and is unloaded.

A model is built completely before it replaces the one with its name, so a load that fails leaves
the old model serving.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.describe import with_instances
from slipstream.repository.models import EngineModel, Repository, RepositoryModel
from slipstream.repository.reading import Reading
from slipstream.server.engine_link.client import EngineStartFailed
from slipstream.server.engine_link.pool import EnginePool, PooledEngine
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.models.build import (
    Recipe,
    engine_names,
    load_engine,
    served_model,
    write_recipe,
)
from slipstream.server.models.factories import ModelFactory, find_factory
from slipstream.server.models.generating import ServedEngine
from slipstream.server.models.warmup import warm_up
from slipstream.server.text.chat import ChatOptions
from slipstream.weights.cache.locks import hold

logger = logging.getLogger(__name__)

# After an engine was replaced, requests that chose it before are still prepared: their prompts are
# tokenized, and their grammars checked. For so long it takes them.
_LATE_SECONDS = 2.0
READY = "READY"
UNAVAILABLE = "UNAVAILABLE"
LOADING = "LOADING"
UNLOADING = "UNLOADING"
_CODE_NAMES = {
    Code.INTERNAL: "Internal",
    Code.INVALID_ARG: "Invalid argument",
    Code.UNSUPPORTED: "Unsupported",
}


class Status(NamedTuple):
    state: str
    reason: str = ""


class LoadFailed(Exception):
    """The reason why a model is UNAVAILABLE, in the words of the index: `Internal: …`."""


@dataclass
class LoadedModel:
    """A model that serves or is ready to."""

    model: RepositoryModel
    versions: dict[int, ServedModel] = field(default_factory=dict)
    client: PooledEngine | None = None  # the engine that it has started, for an engine model
    engine: ServedEngine | None = None  # the same engine, with its tokenizer
    recipe: Recipe | None = None  # how it was built; None for a model of a factory
    engines: dict[str, ServedEngine] = field(default_factory=dict)  # those that it uses, by name
    stamp: object = None  # state of the files that it was loaded from
    number: int = field(default_factory=itertools.count(1).__next__)  # of the load
    mark: BinaryIO | None = None  # tells `slipstream list` that the model is served

    async def close(self) -> None:
        """End the processes of the model."""
        if self.mark is not None:
            self.mark.close()
        for served in dict.fromkeys(self.versions.values()):
            await served.close()


class ModelBuilder:
    """Builds models from the repository: with factories, engines and the models they use."""

    def __init__(
        self,
        registry: ModelRegistry,
        engines: EnginePool,
        factories: Sequence[ModelFactory],
        chat: ChatOptions,
    ) -> None:
        self._registry = registry
        self._engines = engines
        self._factories = factories
        self._chat = chat

    async def build(
        self,
        model: RepositoryModel,
        repository: Repository,
        find_loaded: Callable[[str], ServedEngine | None],
        release: Callable[[PooledEngine], None],
    ) -> LoadedModel:
        """Return the model, warmed up. A model that fails is closed, and its engine released."""
        built = LoadedModel(model)
        factory = find_factory(self._factories, model)
        try:
            if factory is not None:
                for version in model.versions:
                    built.versions[version] = await factory.load(model, version, self._registry)
            else:
                await self._build_known(built, repository, find_loaded)
            warmed: list[ServedModel] = []
            for version, served in built.versions.items():
                if served not in warmed:
                    await warm_up(served, model.config, version)
                    warmed.append(served)
        except BaseException:
            await built.close()
            if built.client is not None:
                self._engines.forget_if(model.name, built.client)
                release(built.client)
            raise
        return built

    async def _build_known(
        self,
        built: LoadedModel,
        repository: Repository,
        find_loaded: Callable[[str], ServedEngine | None],
    ) -> None:
        """Build a model of a known role."""
        model = built.model
        if model.name in repository.engines:
            engine_model = repository.engines[model.name]
            built.client = await self._engines.start(engine_model)
            built.engine = await self._load_engine(engine_model, built.client)
        recipe = self._write_recipe(repository, model)
        for name in engine_names(recipe):
            found = built.engine if name == model.name else find_loaded(name)
            if found is None:
                # the models around an engine need its tokenizer, but not the engine itself
                engine_model = repository.engines[name]
                found = await self._load_engine(engine_model, self._engines.create(engine_model))
            built.engines[name] = found
        built.recipe = recipe
        served = served_model(recipe, built.engines.__getitem__, self._registry)
        built.versions.update(dict.fromkeys(model.versions, served))

    def _write_recipe(self, repository: Repository, model: RepositoryModel) -> Recipe:
        """Return how to build a model. Its configuration has the number of replicas that run."""
        recipe = write_recipe(repository, model)
        replicas = self._engines.overrides.get("replicas")
        if replicas is None or model.name not in repository.engines:
            return recipe
        config = with_instances(model.config, replicas)
        return replace(recipe, model=replace(recipe.model, config=config))

    async def _load_engine(self, model: EngineModel, client: PooledEngine) -> ServedEngine:
        engine = await load_engine(model, client, self._chat, AdapterRegistry(model.adapter_folder))
        if self._engines.frontends == 1:
            return engine
        return replace(engine, outstanding_elsewhere=lambda: self._engines.count_elsewhere(client))


class LoadedModels:
    """The models that serve, and the status of all that should."""

    def __init__(
        self,
        registry: ModelRegistry,
        engines: EnginePool,
        builder: ModelBuilder,
        patience_seconds: float,
        on_unload: Callable[[str], None],
        on_close: Callable[[RepositoryModel], None],
    ) -> None:
        """`on_unload` is called when a model is unloaded, `on_close` when its processes ended.

        `on_close` is also called for a model that another one replaced.
        """
        self._registry = registry
        self._engines = engines
        self._builder = builder
        self._patience_seconds = patience_seconds
        self._on_unload = on_unload
        self._on_close = on_close
        self._models: dict[str, LoadedModel] = {}
        self._repository = Repository((), {}, {}, {})
        self._releases: set[asyncio.Task[None]] = set()
        self.status: dict[str, dict[int, Status]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._models

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._models.values())

    @property
    def outstanding(self) -> int:
        """The number of requests that models with processes of their own work on."""
        served = dict.fromkeys(
            one for loaded in self._models.values() for one in loaded.versions.values()
        )
        return sum(one.outstanding for one in served)

    def is_current(self, model: RepositoryModel) -> bool:
        """Return whether the model that serves is the one on disk."""
        loaded = self._models.get(model.name)
        if loaded is None:
            return False
        same_config = loaded.model.config.document == model.config.document
        return same_config and loaded.stamp == file_stamp(model)

    def needed_by(self, name: str) -> Iterable[str]:
        """Return the models that a loaded model uses, itself last."""
        return self._repository.needed_by(name)

    def users(self, name: str) -> list[str]:
        """Return the loaded models that use this one."""
        return [
            other
            for other in self._models
            if other != name and name in self._repository.needed_by(other)
        ]

    async def load(
        self, name: str, reading: Reading, failures: dict[str, LoadFailed] | None = None
    ) -> None:
        """Load a model and those it uses. LoadFailed says why it cannot serve.

        `failures`: the models that this order to load has tried. They are not tried again: an
        engine can take minutes to fail.
        """
        failures = {} if failures is None else failures
        needed_by = reading.repository.needed_by
        for part in needed_by(name):
            tried = part in failures or any(one in failures for one in needed_by(part))
            if tried or (part in self._models and part != name):
                continue
            try:
                await self._load_one(reading.repository.models[part], reading)
            except LoadFailed as error:
                failures[part] = error
        if name in failures:
            raise failures[name]
        for part in needed_by(name):
            if part in failures:
                raise self._fail_part(name, part, failures[part])

    def _fail_part(self, name: str, part: str, failure: LoadFailed) -> LoadFailed:
        """Log that a model cannot be loaded without a part."""
        text = (
            f"ensemble '{name}' depends on '{part}' which has no loaded version. "
            f"Model '{part}' loading failed with error: {failure}"
        )
        context = {"place": "model_repository_manager.cc:580", "model": name}
        logger.error("Invalid argument: %s", text, extra=context)
        return LoadFailed(text)

    async def _load_one(self, model: RepositoryModel, reading: Reading) -> None:
        if not model.versions:
            if model.name not in self._models:
                self._registry.retire(model.name)
            raise LoadFailed(
                "at least one version must be available under the version policy of model "
                f"'{model.name}'"
            )
        if model.name in reading.repository.engines and self.is_current(model):
            return  # an engine takes long to load
        errors = [problem.text for problem in reading.list_errors(model)]
        if errors:
            code = "Invalid argument" if "backend library" in errors[0] else "Internal"
            raise self._fail(model, f"{code}: {'; '.join(errors)}")
        if model.name not in self._models:
            self.status[model.name] = dict.fromkeys(model.versions, Status(LOADING))
        _log(473, model.name, f"loading: {model.name}:{model.versions[-1]}")
        try:
            built = await self._builder.build(
                model, reading.repository, self._find_engine, self._release
            )
        except InferenceError as error:
            code = _CODE_NAMES.get(error.code, "Internal")
            raise self._fail(model, f"{code}: {error.message}") from error
        except (OSError, ValueError, EngineStartFailed) as error:
            raise self._fail(model, f"Internal: {error}") from error
        self._put_in_place(built, reading.repository)

    def _find_engine(self, name: str) -> ServedEngine | None:
        loaded = self._models.get(name)
        return None if loaded is None else loaded.engine

    def _fail(self, model: RepositoryModel, reason: str) -> LoadFailed:
        """Note why a model cannot be loaded. The one that served before continues serving."""
        if model.name not in self._models:
            self._set_status(model, Status(UNAVAILABLE, reason))
            self._registry.retire(model.name)
        version = model.versions[-1]
        text = f"failed to load '{model.name}' version {version}: {reason}"
        logger.error(text, extra=log_context(654, model.name))
        return LoadFailed(f"version {version} is at UNAVAILABLE state: {reason};")

    def _set_status(self, model: RepositoryModel, status: Status) -> None:
        self.status[model.name] = dict.fromkeys(model.versions, status)

    def _put_in_place(self, built: LoadedModel, repository: Repository) -> None:
        model = built.model
        predecessor = self._models.get(model.name)
        self._registry.replace(model.name, built.versions)
        built.stamp = file_stamp(model)
        built.mark = hold(model.folder / CONFIG_NAME)
        self._models[model.name] = built
        replaced = None
        if built.client is not None:
            replaced = self._engines.adopt(model.name, built.client)
        if replaced is not None:
            self._rebuild_users(model.name, repository)
            self._run_later(self._engines.release(replaced, self._patience_seconds, _LATE_SECONDS))
        former = self.status.get(model.name, {})
        gone = [version for version in former if version not in model.versions]
        self._set_status(model, Status(READY))
        self.status[model.name] |= dict.fromkeys(gone, Status(UNAVAILABLE, "unloaded"))
        self._repository = repository
        if predecessor is not None:
            self._run_later(self._close(predecessor))
        _log(849, model.name, f"successfully loaded '{model.name}'")

    def _rebuild_users(self, engine: str, repository: Repository) -> None:
        """Give the text models over an engine that was replaced the new one."""

        def find(name: str) -> ServedEngine:
            found = self._find_engine(name)
            assert found is not None, f"engine {name} of a loaded model is not loaded"
            return found

        for user in self.users(engine):
            if user in repository.pipelines:
                loaded = self._models[user]
                loaded.recipe = write_recipe(repository, loaded.model)
                loaded.engines = {name: find(name) for name in engine_names(loaded.recipe)}
                served = served_model(loaded.recipe, loaded.engines.__getitem__, self._registry)
                loaded.versions = dict.fromkeys(loaded.model.versions, served)
                self._registry.replace(user, loaded.versions)

    def unload(self, name: str) -> list[str]:
        """Unload a model and those that use it. Return the names of all."""
        loaded = self._models.pop(name, None)
        if loaded is None:
            return [name]
        self._registry.retire(name)
        self._on_unload(name)
        unloading = Status(UNLOADING)
        self._set_status(loaded.model, unloading)
        self._run_later(self._finish_unload(loaded, self._engines.forget(name), unloading))
        version = loaded.model.versions[-1]
        _log(636, name, f"successfully unloaded '{name}' version {version}")
        unloaded = [name]
        for user in self.users(name):
            if user not in self._models:
                continue  # unloaded with another user
            unloaded += self.unload(user)
        return unloaded

    async def _finish_unload(
        self, loaded: LoadedModel, client: PooledEngine | None, unloading: Status
    ) -> None:
        """Wait until the processes of an unloaded model have ended, and note it."""
        await self._close(loaded)
        if client is not None:
            await self._engines.release(client, self._patience_seconds)
        for version, status in self.status.get(loaded.model.name, {}).items():
            if status is unloading:  # it was not loaded again
                self.status[loaded.model.name][version] = Status(UNAVAILABLE, "unloaded")

    async def _close(self, loaded: LoadedModel) -> None:
        await loaded.close()
        self._on_close(loaded.model)

    async def close(self) -> None:
        await asyncio.gather(*(self._close(loaded) for loaded in self._models.values()))
        await asyncio.gather(*self._releases)

    def _release(self, client: PooledEngine) -> None:
        self._run_later(self._engines.release(client, self._patience_seconds))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


def file_stamp(model: RepositoryModel) -> tuple[tuple[int, ...], int]:
    """Return what changes with a model's files: its versions, and the time of the newest file."""
    files = [path for path in model.folder.glob("*/*") if path.is_file()] + [model.config.file]
    return model.versions, max(file.stat().st_mtime_ns for file in files)


def log_context(line: int, model: str) -> dict[str, str]:
    """Return the attributes of a log line that copies Triton's line from its model lifecycle."""
    return {"place": f"model_lifecycle.cc:{line}", "model": model}


def _log(line: int, model: str, text: str) -> None:
    logger.info(text, extra=log_context(line, model))
