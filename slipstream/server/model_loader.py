"""Loading and unloading by request: at the start, by clients, or when a folder changes.

One load or unload runs at a time. `LoadedModels` does the work on each model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.models import RepositoryModel, inspect_repository
from slipstream.repository.reading import Reading
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.errors import InferenceError, Unavailable
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.repository_control import NOT_EXPLICIT, cannot_poll
from slipstream.server.loaded_models import (
    READY,
    LoadedModel,
    LoadedModels,
    LoadFailed,
    ModelBuilder,
    log_context,
)
from slipstream.server.models.factories import ModelFactory, find_factory
from slipstream.server.options import ControlMode
from slipstream.server.sent_models import refuse_files, remove_folder, write_folder
from slipstream.server.text.chat import DEFAULT_CHAT, ChatOptions

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01  # interval of `wait_idle`


class ModelLoader:
    def __init__(
        self,
        paths: Sequence[Path],
        registry: ModelRegistry,
        engines: EnginePool,
        factories: Sequence[ModelFactory] = (),
        mode: ControlMode = "none",
        patience_seconds: float = 30.0,
        on_unload: Callable[[str], None] = lambda name: None,
        chat: ChatOptions = DEFAULT_CHAT,
    ) -> None:
        """`on_unload` is called with the name of each model that is unloaded."""
        self._paths = tuple(paths)
        self._factories = factories
        self._mode = mode
        self._loaded = LoadedModels(
            registry,
            engines,
            ModelBuilder(registry, engines, factories, chat),
            patience_seconds,
            on_unload,
            self._remove_files,
        )
        self._explicit: set[str] = set()  # models that were loaded by name
        # models that were loaded, also as a part of others, and not unloaded by name since
        self._wanted: set[str] = set()
        self._overrides: dict[str, Mapping[str, Any]] = {}  # configurations sent by clients
        self._sent: dict[str, Path] = {}  # folders of the models whose files clients sent
        self._temporary: set[Path] = set()  # all such folders that exist
        self._lock = asyncio.Lock()
        # awaited before models are unloaded: what other front ends have counted arrives
        self.before_unload: Callable[[], Awaitable[None]] = _do_nothing
        # awaited after each change, before it is reported: other front ends follow it
        self.after_change: Callable[[], Awaitable[None]] = _do_nothing

    # -- requests of clients

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = []
        for name in sorted({*self._folders(), *self._loaded.status}):
            versions = self._loaded.status.get(name, {})
            if not versions and not ready_only:
                rows.append({"name": name})
            for version, status in sorted(versions.items()):
                if status.state == READY or not ready_only:
                    row = {"name": name, "version": str(version), "state": status.state}
                    rows.append({**row, "reason": status.reason} if status.reason else row)
        return rows

    async def load(
        self,
        name: str,
        override: Mapping[str, Any] | None = None,
        files: Mapping[PurePosixPath, bytes] | None = None,
    ) -> None:
        self._check_explicit()
        folder = None if files is None else await self._write_files(name, override, files)
        async with self._lock:
            try:
                await self._load(name, override, folder)
            finally:
                await self.after_change()

    async def _write_files(
        self,
        name: str,
        override: Mapping[str, Any] | None,
        files: Mapping[PurePosixPath, bytes],
    ) -> Path:
        if not any(factory.accepts_files for factory in self._factories):
            raise refuse_files(name)
        if override is None:
            raise cannot_poll(name)
        folder = await asyncio.to_thread(write_folder, name, files)
        self._temporary.add(folder)
        return folder

    async def _load(
        self, name: str, override: Mapping[str, Any] | None, folder: Path | None
    ) -> None:
        former_overrides = self._overrides
        former_sent = self._sent
        self._overrides = _replaced(self._overrides, name, override)
        self._sent = _replaced(self._sent, name, folder)
        try:
            reading = self.read(self._overrides)
            model = reading.repository.models.get(name)
            if model is None or model.malformed:
                raise cannot_poll(name)
            self._wanted |= set(reading.repository.needed_by(name))
            is_new = not self._loaded.is_current(model)
            await self._loaded.load(name, reading)
        except BaseException as error:
            self._overrides = former_overrides
            self._sent = former_sent
            if folder is not None:
                self._remove(folder)
            if isinstance(error, LoadFailed):
                raise InferenceError(f"load failed for model '{name}': {error}\n") from error
            raise
        if is_new:  # a model that serves already stays a part of the one that loaded it
            self._explicit.add(name)
        await self._load_users(name, reading)

    async def _load_users(self, name: str, reading: Reading) -> None:
        """Load the models that became unavailable when this one was unloaded, or failed to load."""
        tried: dict[str, LoadFailed] = {}
        for user in reading.repository.models:
            parts = set(reading.repository.needed_by(user))
            if name not in parts or user in self._loaded or not parts <= self._wanted:
                continue
            try:
                await self._loaded.load(user, reading, tried)
            except LoadFailed as error:
                logger.error("failed to load '%s': %s", user, error, extra=log_context(654, user))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._check_explicit()
        async with self._lock:
            parts = list(self._loaded.needed_by(name)) if unload_dependents else []
            await self.before_unload()
            self._unload(name)
            for part in reversed(parts):
                if part not in self._explicit and not self._loaded.users(part):
                    self._unload(part)
            await asyncio.sleep(0)  # models without processes of their own are unloaded now
            await self.after_change()

    @property
    def models_ready(self) -> bool:
        """Return whether every model that should be loaded serves: strict readiness."""
        versions = self._loaded.status.values()
        statuses = [status for by_version in versions for status in by_version.values()]
        return all(status.state == READY or status.reason == "unloaded" for status in statuses)

    # -- calls of the server

    def read(self, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Reading:
        """Read the repository. `overrides`: configurations in place of those in the files."""

        def is_claimed(model: RepositoryModel) -> bool:
            return find_factory(self._factories, model) is not None

        return Reading(*inspect_repository(self._paths, is_claimed, overrides, self._sent))

    async def load_all(self, names: Iterable[str], reading: Reading) -> dict[str, str]:
        """Load these models. Return the reason of each that failed."""
        async with self._lock:
            failed: dict[str, str] = {}
            tried: dict[str, LoadFailed] = {}
            for name in names:
                try:
                    if name not in reading.repository.models:
                        raise LoadFailed("failed to poll from model repository")
                    self._wanted |= set(reading.repository.needed_by(name))
                    # it may have been loaded as a part of another model
                    if not self._loaded.is_current(reading.repository.models[name]):
                        await self._loaded.load(name, reading, tried)
                    self._explicit.add(name)
                except LoadFailed as error:
                    failed[name] = str(error)
            await self.after_change()
            return failed

    async def poll(self, seconds: float) -> None:
        """Follow changes of the repository, forever: load new and changed models, unload others."""
        while True:
            await asyncio.sleep(seconds)
            reading = self.read()
            models = reading.repository.models
            removed = [name for name in self._loaded.names if name not in models]
            async with self._lock:
                if removed:
                    await self.before_unload()
                for name in removed:
                    self._unload(name)
                if removed:
                    await self.after_change()
            changed = [name for name, model in models.items() if not self._loaded.is_current(model)]
            for name, reason in (await self.load_all(changed, reading)).items():
                logger.error("failed to load '%s': %s", name, reason, extra=log_context(654, name))

    def reason(self, name: str) -> str:
        """Return why a model does not serve; empty where it does."""
        statuses = self._loaded.status.get(name, {}).values()
        return next((status.reason for status in statuses if status.reason), "")

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of Triton's table: model, version, status."""
        return [
            (name, str(version), status.state + (f": {status.reason}" if status.reason else ""))
            for name, versions in sorted(self._loaded.status.items())
            for version, status in sorted(versions.items())
        ]

    @property
    def loaded(self) -> Iterable[LoadedModel]:
        """The models that serve."""
        return self._loaded

    @property
    def outstanding(self) -> int:
        """The number of requests that models with processes of their own work on."""
        return self._loaded.outstanding

    async def wait_idle(self) -> None:
        while self.outstanding:
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        await self._loaded.close()
        for folder in list(self._temporary):
            self._remove(folder)

    def _check_explicit(self) -> None:
        if self._mode != "explicit":
            raise Unavailable(NOT_EXPLICIT)

    def _folders(self) -> list[str]:
        """Return the names of all folders with a configuration."""
        names = []
        for path in self._paths:
            folders = path.iterdir() if path.is_dir() else ()
            for folder in folders:
                if (folder / CONFIG_NAME).is_file() and not folder.name.startswith("."):
                    names.append(folder.name)
        return names

    def _unload(self, name: str) -> None:
        """Unload a model and those that use it. They come back when it is loaded again."""
        self._explicit.discard(name)
        self._wanted.discard(name)
        self._overrides = _replaced(self._overrides, name, None)
        self._sent = _replaced(self._sent, name, None)
        self._loaded.unload(name)

    def _remove_files(self, model: RepositoryModel) -> None:
        """Remove the folder of a model that is no longer used, if a client sent it."""
        if model.folder not in self._sent.values():
            self._remove(model.folder)

    def _remove(self, folder: Path) -> None:
        if folder in self._temporary:
            self._temporary.discard(folder)
            remove_folder(folder)


async def _do_nothing() -> None:
    """Return at once: there is only one front end."""


def _replaced(values: dict[str, _T], name: str, value: _T | None) -> dict[str, _T]:
    """Return a copy with another value for a name, or without one."""
    changed = {key: other for key, other in values.items() if key != name}
    return changed if value is None else {**changed, name: value}
