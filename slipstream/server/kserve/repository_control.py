"""Index, load and unload: the interface through which all protocols control the repository.

`ModelLoader` (model_loader.py) implements it; `NoControl` does where the models are fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol

from slipstream.server.kserve.errors import Code, InferenceError, Unavailable

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
FILE_PREFIX = "file:"
MAX_FILES = 1000
MAX_FILE_BYTES = 256 << 20
NAMED_REPOSITORY = "'repository_name' specification is not supported"


class RepositoryControl(Protocol):
    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Return for each model its name and, where known, version, state and reason, in order."""
        ...

    async def load(
        self,
        name: str,
        override: Mapping[str, Any] | None = None,
        files: Mapping[PurePosixPath, bytes] | None = None,
    ) -> None:
        """Load a model and return when it serves.

        `override` replaces its configuration file. `files` replace its folder, and need an
        override.
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
    """Control of a server whose models are fixed: all models of the registry serve."""

    def __init__(self, registry: Iterable[Named] = ()) -> None:
        self._registry = registry

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return [
            {"name": entry.name, "version": entry.version, "state": "READY"}
            for entry in self._registry
        ]

    async def load(
        self,
        name: str,
        override: Mapping[str, Any] | None = None,
        files: Mapping[PurePosixPath, bytes] | None = None,
    ) -> None:
        raise Unavailable(NOT_EXPLICIT)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        raise Unavailable(NOT_EXPLICIT)


def check_repository_name(name: str) -> None:
    if name:
        raise InferenceError(NAMED_REPOSITORY, Code.UNSUPPORTED)


@dataclass
class LoadParameters:
    """The parameters of a load request: a configuration as JSON text, and files by their names."""

    config: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # `file:1/model.py` and its content


async def load_model(control: RepositoryControl, name: str, parameters: LoadParameters) -> None:
    """Load with a client's parameters."""
    override = None if parameters.config is None else _configuration(name, parameters.config)
    files = read_files(parameters.files) if parameters.files else None
    await control.load(name, override, files)


def read_files(files: Mapping[str, bytes]) -> dict[PurePosixPath, bytes]:
    """Return a client's files by their paths in the model's folder. Raises InferenceError."""
    size = sum(map(len, files.values()))
    if len(files) > MAX_FILES or size > MAX_FILE_BYTES:
        raise InferenceError(
            f"a model may have at most {MAX_FILES} files and {MAX_FILE_BYTES} bytes, "
            f"got {len(files)} files and {size} bytes"
        )
    found: dict[PurePosixPath, bytes] = {}
    for name, content in files.items():
        path = PurePosixPath(name.removeprefix(FILE_PREFIX))
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise InferenceError(
                f"the file '{name}' is outside of the model's folder; give a relative path "
                "without '..', such as 'file:1/model.py'"
            )
        found[path] = content
    return found


def _configuration(name: str, text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise cannot_poll(name) from error
    if not isinstance(document, dict):
        raise cannot_poll(name)
    return document


def cannot_poll(name: str) -> InferenceError:
    return InferenceError(
        f"failed to load '{name}', failed to poll from model repository", Code.INTERNAL
    )
