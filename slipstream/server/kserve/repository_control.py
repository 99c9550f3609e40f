"""Index, load and unload: the interface through which all protocols control the repository.

`ModelLoader` (model_loader.py) implements it; `NoControl` does where the models are fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from slipstream.server.kserve.errors import Code, InferenceError, Unavailable

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
NAMED_REPOSITORY = "'repository_name' specification is not supported"


class RepositoryControl(Protocol):
    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Return for each model its name and, where known, version, state and reason, in order."""
        ...

    async def load(self, name: str, override: Mapping[str, Any] | None = None) -> None:
        """Load a model and return when it serves. `override` replaces its configuration file."""
        ...

    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class Named(Protocol):
    """A `ModelVersion` of the registry."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class NoControl:
    """Control of a server whose models are fixed: all models of the registry serve."""

    def __init__(self, registry: Iterable[Named] = ()) -> None:
        self._registry = registry

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return [
            {"name": entry.name, "version": entry.version, "state": "READY"}
            for entry in self._registry
        ]

    async def load(self, name: str, override: Mapping[str, Any] | None = None) -> None:
        raise Unavailable(NOT_EXPLICIT)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        raise Unavailable(NOT_EXPLICIT)


def check_repository_name(name: str) -> None:
    if name:
        raise InferenceError(NAMED_REPOSITORY, Code.UNSUPPORTED)


async def load_model(control: RepositoryControl, name: str, parameters: Mapping[str, Any]) -> None:
    """Load with a client's parameters: `config` is a JSON configuration, `file:…` a file."""
    override: Mapping[str, Any] | None = None
    if any(key.startswith("file:") for key in parameters):
        # files from the network could be code of any client's choice
        raise cannot_poll(name)
    config = parameters.get("config")
    if config is not None:
        override = _configuration(name, config)
    await control.load(name, override)


def _configuration(name: str, text: Any) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (TypeError, ValueError) as error:
        raise cannot_poll(name) from error
    if not isinstance(document, dict):
        raise cannot_poll(name)
    return document


def cannot_poll(name: str) -> InferenceError:
    return InferenceError(
        f"failed to load '{name}', failed to poll from model repository", Code.INTERNAL
    )
