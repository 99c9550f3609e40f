"""The models of a repository as they come and go: loaded at the start, on request or when a folder
changes.

A model is built completely before it takes the place of the one of its name, so a load that fails
leaves what served serving. One load or unload runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.models import (
    EngineModel,
    Repository,
    RepositoryModel,
    inspect_repository,
)
from slipstream.repository.reading import Reading
from slipstream.server.engine_link.client import EngineClient, EngineStartFailed
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.kserve.errors import Code, InferenceError, Unavailable
from slipstream.server.kserve.inference import ServedModel
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.kserve.repository_control import NOT_EXPLICIT, cannot_poll
from slipstream.server.model_factories import ModelFactory, claiming
from slipstream.server.models.build import served_model
from slipstream.server.models.llm_models import Generator
from slipstream.server.options import ControlMode
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.warmup import warm_up

logger = logging.getLogger(__name__)

READY, UNAVAILABLE, LOADING = "READY", "UNAVAILABLE", "LOADING"
_IDLE_SECONDS = 0.01  # between looks whether models still work, while the server stops


_CODE_NAMES = {
    Code.INTERNAL: "Internal",
    Code.INVALID_ARG: "Invalid argument",
    Code.UNSUPPORTED: "Unsupported",
}


def _log_context(line: int, model: str) -> dict[str, str]:
    """Return the attributes of a log line that copies Triton's line from its model lifecycle."""
    return {"place": f"model_lifecycle.cc:{line}", "model": model}


class Status(NamedTuple):
    state: str
    reason: str = ""


@dataclass
class _Built:
    """A model that is ready to take its place, and the engine it has started, where it is one."""

    models: dict[int, ServedModel]
    engine: EngineClient | None = None
    generator: Generator | None = None


class LoadFailed(Exception):
    """Why a model is UNAVAILABLE, as the index shows it: `Internal: …`."""


class ModelLoader:
    def __init__(
        self,
        paths: Sequence[Path],
        registry: ModelRegistry,
        engines: EnginePool,
        factories: Sequence[ModelFactory] = (),
        mode: ControlMode = "none",
        patience_seconds: float = 30.0,
        unregister: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._paths = tuple(paths)
        self._registry = registry
        self._engines = engines
        self._factories = factories
        self._mode = mode
        self._patience_seconds = patience_seconds
        self._unregister = unregister  # told the name of a model that is gone
        self._status: dict[str, dict[int, Status]] = {}
        self._explicit: set[str] = set()  # asked for by name, so that nothing else takes them away
        self._loaded: dict[str, RepositoryModel] = {}
        self._stamps: dict[str, object] = {}  # of the files they were loaded from
        self._served: dict[str, list[ServedModel]] = {}
        self._overrides: dict[str, Mapping[str, Any]] = {}
        self._generators: dict[str, Generator] = {}  # of the engines that are loaded
        self._repository = Repository((), {}, {}, {})
        self._lock = asyncio.Lock()
        self._releases: set[asyncio.Task[None]] = set()

    # -- what the protocols ask

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = []
        for name in sorted({*self._folders(), *self._status}):
            versions = self._status.get(name, {})
            if not versions and not ready_only:
                rows.append({"name": name})
            for version, status in sorted(versions.items()):
                if status.state == READY or not ready_only:
                    row = {"name": name, "version": str(version), "state": status.state}
                    rows.append({**row, "reason": status.reason} if status.reason else row)
        return rows

    async def load(self, name: str, override: Mapping[str, Any] | None = None) -> None:
        self._check_explicit()
        async with self._lock:
            overrides = {**self._overrides}
            overrides.pop(name, None)
            if override is not None:
                overrides[name] = override
            reading = self.read(overrides)
            model = reading.repository.models.get(name)
            if model is None or model.malformed:
                raise cannot_poll(name)
            try:
                await self._load_with_parts(name, reading)
            except LoadFailed as error:
                raise InferenceError(f"load failed for model '{name}': {error}\n") from error
            self._overrides = overrides
            self._explicit.add(name)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._check_explicit()
        async with self._lock:
            parts = self._repository.needed_by(name) if unload_dependents else ()
            self._unload(name)
            for part in reversed(parts):
                if part not in self._explicit and not self._users(part):
                    self._unload(part)

    @property
    def models_ready(self) -> bool:
        """Whether nothing that was asked for failed: strict readiness."""
        statuses = [status for versions in self._status.values() for status in versions.values()]
        return all(status.state == READY or status.reason == "unloaded" for status in statuses)

    # -- what the server does with it

    def read(self, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Reading:
        def claimed(model: RepositoryModel) -> bool:
            return claiming(self._factories, model) is not None

        return Reading(*inspect_repository(self._paths, claimed, overrides))

    async def load_all(self, names: Iterable[str], reading: Reading) -> dict[str, str]:
        """Load these; what could not be is returned, with the reason. Engines load side by side."""
        async with self._lock:
            failed: dict[str, str] = {}
            for name in names:
                try:
                    if name not in reading.repository.models:
                        raise LoadFailed("failed to poll from model repository")
                    # it may have come as part of another
                    if not self._is_current(reading.repository.models[name]):
                        await self._load_with_parts(name, reading)
                    self._explicit.add(name)
                except LoadFailed as error:
                    failed[name] = str(error)
            return failed

    async def poll(self, seconds: float) -> None:
        """Look for changes for ever: new folders are loaded, gone ones unloaded, changed ones
        loaded again.
        """
        while True:
            await asyncio.sleep(seconds)
            reading = self.read()
            models = reading.repository.models
            gone = [name for name in self._loaded if name not in models]
            async with self._lock:
                for name in gone:
                    self._unload(name)
            changed = [name for name, model in models.items() if not self._is_current(model)]
            for name, reason in (await self.load_all(changed, reading)).items():
                logger.error("failed to load '%s': %s", name, reason, extra=_log_context(654, name))

    def reason(self, name: str) -> str:
        """Why a model does not serve; empty where it does."""
        return next(
            (status.reason for status in self._status.get(name, {}).values() if status.reason), ""
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Triton's table: model, version, status."""
        return [
            (name, str(version), status.state + (f": {status.reason}" if status.reason else ""))
            for name, versions in sorted(self._status.items())
            for version, status in sorted(versions.items())
        ]

    @property
    def under_way(self) -> int:
        """Requests that models with processes of their own have taken up."""
        models = dict.fromkeys(model for versions in self._served.values() for model in versions)
        return sum(getattr(model, "under_way", 0) for model in models)

    async def wait_idle(self) -> None:
        while self.under_way:
            await asyncio.sleep(_IDLE_SECONDS)

    async def close(self) -> None:
        await asyncio.gather(*map(_close, self._served.values()))
        await asyncio.gather(*self._releases)

    # -- one model

    def _check_explicit(self) -> None:
        if self._mode != "explicit":
            raise Unavailable(NOT_EXPLICIT)

    def _folders(self) -> list[str]:
        return [
            folder.name
            for path in self._paths
            if path.is_dir()
            for folder in path.iterdir()
            if (folder / CONFIG_NAME).is_file() and not folder.name.startswith(".")
        ]

    def _is_current(self, model: RepositoryModel) -> bool:
        """Whether what serves is what is on disk."""
        loaded = self._loaded.get(model.name)
        same = loaded is not None and loaded.config.document == model.config.document
        return same and self._stamps.get(model.name) == _stamp(model)

    def _users(self, name: str) -> list[str]:
        """The loaded models that need this one."""
        return [
            other
            for other in self._loaded
            if other != name and name in self._repository.needed_by(other)
        ]

    async def _load_with_parts(self, name: str, reading: Reading) -> None:
        for part in reading.repository.needed_by(name):
            if part == name or part not in self._loaded:
                try:
                    await self._load_one(reading.repository.models[part], reading)
                except LoadFailed as error:
                    if part == name:
                        raise
                    raise self._failed(
                        reading.repository.models[name], _depends(name, part, str(error))
                    ) from error

    async def _load_one(self, model: RepositoryModel, reading: Reading) -> None:
        if not model.versions:
            text = f"at least one version must be available under the version policy of model '{model.name}'"
            self._registry.retire(model.name)
            raise LoadFailed(text)
        if model.name in reading.repository.engines and self._is_current(model):
            return  # an engine takes long to load
        errors = [problem.text for problem in reading.errors_of(model)]
        if errors:
            code = "Invalid argument" if "backend library" in errors[0] else "Internal"
            raise self._failed(model, f"{code}: {'; '.join(errors)}")
        if model.name not in self._loaded:
            self._status[model.name] = dict.fromkeys(model.versions, Status(LOADING))
        logger.info(
            "loading: %s:%s", model.name, model.versions[-1], extra=_log_context(473, model.name)
        )
        try:
            built = await self._build(model, reading.repository)
        except InferenceError as error:
            raise self._failed(
                model, f"{_CODE_NAMES.get(error.code, 'Internal')}: {error.message}"
            ) from error
        except (OSError, ValueError, EngineStartFailed) as error:
            raise self._failed(model, f"Internal: {error}") from error
        self._put_in_place(model, built, reading.repository)

    def _failed(self, model: RepositoryModel, reason: str) -> LoadFailed:
        """Note why. What served before goes on serving."""
        if model.name not in self._loaded:
            self._status[model.name] = {
                version: Status(UNAVAILABLE, reason) for version in model.versions
            }
            self._registry.retire(model.name)
        text = f"failed to load '{model.name}' version {model.versions[-1]}: {reason}"
        logger.error(text, extra=_log_context(654, model.name))
        return LoadFailed(f"version {model.versions[-1]} is at UNAVAILABLE state: {reason};")

    async def _build(self, model: RepositoryModel, repository: Repository) -> _Built:
        factory = claiming(self._factories, model)
        built = _Built({})
        try:
            if factory is not None:
                for version in model.versions:
                    built.models[version] = await factory.load(model, version, self._registry)
            else:
                await self._build_known(model, repository, built)
            for version, served in {
                id(one): (key, one) for key, one in built.models.items()
            }.values():
                await warm_up(served, model.config, version)
        except BaseException:
            await _close(list(built.models.values()))
            if built.engine is not None:
                self._engines.forget_if(model.name, built.engine)
                self._release(built.engine)
            raise
        return built

    async def _build_known(
        self, model: RepositoryModel, repository: Repository, built: _Built
    ) -> None:
        if model.name in repository.engines:
            engine = repository.engines[model.name]
            built.engine = await self._engines.start(engine)
            built.generator = text_generator(engine, built.engine)

        def generator_of(name: str) -> Generator:
            """The new engine's; or that of the one that serves; or, for the text around it, one
            that never starts.
            """
            if name == model.name and built.generator is not None:
                return built.generator
            engine = repository.engines[name]
            return self._generators.get(name) or text_generator(
                engine, self._engines.create(engine)
            )

        served = served_model(repository, model, generator_of, self._registry)
        built.models.update(dict.fromkeys(model.versions, served))

    def _put_in_place(self, model: RepositoryModel, built: _Built, repository: Repository) -> None:
        before = self._served.pop(model.name, [])
        self._registry.replace(model.name, built.models)
        if built.engine is not None and built.generator is not None:
            self._generators[model.name] = built.generator
            replaced = self._engines.adopt(model.name, built.engine)
            if replaced is not None:
                self._move_users(model.name, repository)
                self._release(replaced)
        self._loaded[model.name] = model
        self._stamps[model.name] = _stamp(model)
        self._served[model.name] = list(built.models.values())
        self._status[model.name] = dict.fromkeys(model.versions, Status(READY))
        self._repository = repository
        if before:
            self._later(_close(before))
        logger.info("successfully loaded '%s'", model.name, extra=_log_context(849, model.name))

    def _move_users(self, engine: str, repository: Repository) -> None:
        """The text models over an engine that was replaced go on with the new one."""
        for user in self._users(engine):
            if user in repository.chains:
                model = self._loaded[user]
                served = served_model(
                    repository, model, self._generators.__getitem__, self._registry
                )
                self._registry.replace(user, dict.fromkeys(model.versions, served))

    def _unload(self, name: str) -> None:
        model = self._loaded.pop(name, None)
        self._explicit.discard(name)
        self._overrides.pop(name, None)
        if model is None:
            return
        self._registry.retire(name)
        self._unregister(name)
        self._status[name] = dict.fromkeys(model.versions, Status(UNAVAILABLE, "unloaded"))
        self._generators.pop(name, None)
        self._later(_close(self._served.pop(name, [])))
        client = self._engines.forget(name)
        if client is not None:
            self._release(client)
        logger.info(
            "successfully unloaded '%s' version %s",
            name,
            model.versions[-1],
            extra=_log_context(636, name),
        )
        for user in self._users(name):
            self._unload_user(user, name)

    def _unload_user(self, user: str, part: str) -> None:
        """A model whose part is gone cannot serve; the index says why."""
        model = self._loaded[user]
        self._unload(user)
        reason = (
            f"Invalid argument: ensemble '{user}' depends on '{part}' which has no loaded version"
        )
        self._status[user] = dict.fromkeys(model.versions, Status(UNAVAILABLE, reason))

    def _release(self, client: EngineClient) -> None:
        self._later(self._engines.release(client, self._patience_seconds))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


def text_generator(model: EngineModel, engine: EngineClient) -> Generator:
    # Its type does not say that its engine knows whether it is ready; this one does.
    adapters = AdapterRegistry(model.adapter_folder)
    return cast(Generator, TextGenerator(Tokenizer.load(model.tokenizer_folder), engine, adapters))


def _depends(name: str, part: str, reason: str) -> str:
    text = f"ensemble '{name}' depends on '{part}' which has no loaded version."
    return f"Invalid argument: {text} Model '{part}' loading failed with error: {reason}"


def _stamp(model: RepositoryModel) -> tuple[tuple[int, ...], int]:
    """What changes when somebody changes a model's files: its versions, and when the newest file
    was written.
    """
    files = [path for path in model.folder.glob("*/*") if path.is_file()] + [model.config.file]
    return model.versions, max(file.stat().st_mtime_ns for file in files)


async def _close(models: Sequence[ServedModel]) -> None:
    """End what a model runs besides its requests, where it runs something."""
    for model in dict.fromkeys(models):
        close = getattr(model, "close", None)
        if close is not None:
            await close()
