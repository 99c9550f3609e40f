"""Index, load and unload: what clients may ask of the repository, whatever the protocol.

`ModelLoader` (model_loader.py) does the work; `NoControl` stands in where the models are fixed.
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
        """name, and where there is one: version, state, reason; in that order."""
        ...

    async def load(self, name: str, override: Mapping[str, Any] | None = None) -> None:
        """Returns when the model serves. `override` is a configuration that stands in for the
        model's file.
        """
        ...

    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class Named(Protocol):
    """A `ModelVersion` of the registry."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class NoControl:
    """A server whose models neither come nor go; all that are in the registry serve."""

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
    """Load with the parameters a client sent: `config` is a JSON configuration, `file:…` a file to
    put in place.
    """
    override: Mapping[str, Any] | None = None
    if any(key.startswith("file:") for key in parameters):
        # a model whose files come over the network would be code of a stranger's choice
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
