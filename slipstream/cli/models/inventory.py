"""The models and engines that `list`, `show` and `remove` select, and their printed form."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.progress import size_text
from slipstream.repository.collection import UserModel, list_models
from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.used_repositories import served_repositories
from slipstream.weights.cache.engines import (
    CachedEngine,
    describe_engine,
    list_engines,
    type_name,
)
from slipstream.weights.engine_config import EngineFolderError

_NONE = "-"
_MINUTE = 60
_UNITS = ((86400, "day"), (3600, "hour"), (_MINUTE, "minute"))


@dataclass(frozen=True)
class FoundModel:
    """A model of a repository, or an engine of the cache that no model of that repository uses."""

    name: str
    model: UserModel | None  # None: only the engine exists
    engine: CachedEngine | None  # None: it has none, or none that can be read

    @property
    def family(self) -> str:
        if self.engine is None:
            return _NONE
        architecture = self.engine.config.spec.architecture
        return architecture.partition("For")[0].removesuffix("LMHeadModel")

    @property
    def size(self) -> str:
        return _NONE if self.engine is None else size_text(self.engine.bytes)

    @property
    def type(self) -> str:
        return _NONE if self.engine is None else type_name(self.engine.config)

    @property
    def source(self) -> str:
        return (self.engine.config.source if self.engine is not None else "") or _NONE

    @property
    def age(self) -> str:
        """Return how long ago it was imported, or built if it is only an engine."""
        if self.model is not None:
            since = (self.model.folder / CONFIG_NAME).stat().st_mtime
        else:
            assert self.engine is not None
            since = self.engine.built_seconds
        return age_text(time.time() - since)

    @property
    def served(self) -> bool:
        """Whether a running process has loaded it."""
        if self.model is not None:
            return self.model.served
        return self.engine is not None and self.engine.in_use


def find_all(repository: Path) -> tuple[list[FoundModel], list[FoundModel]]:
    """Return the models of a repository, and those that the engine cache has besides."""
    own = list_models(repository)
    models = [FoundModel(name, model, _engine(model)) for name, model in own.items()]
    used = {found.engine.path for found in models if found.engine is not None}
    others = []
    served = _served_models()
    for engine in list_engines():
        if engine.path not in used:
            model = served.get(engine.path)
            others.append(FoundModel(model.name if model else engine.path.name, model, engine))
    return models, others


def _served_models() -> dict[Path, UserModel]:
    """Return the models of `slipstream start MODEL`, by their engine."""
    found = {}
    for folder in sorted(served_repositories().glob("*")):
        for model in list_models(folder).values():
            if model.engine is not None:
                found[model.engine] = model
    return found


def _engine(model: UserModel) -> CachedEngine | None:
    try:
        return None if model.engine is None else describe_engine(model.engine)
    except EngineFolderError:
        return None  # the repository's own checks report it


def find_one(repository: Path, name: str) -> FoundModel:
    """Return the model or cached engine of this name, a model of the repository first."""
    models, others = find_all(repository)
    for found in (*models, *others):
        if found.name == name or (found.engine is not None and found.engine.path.name == name):
            return found
    known = ", ".join(found.name for found in (*models, *others)) or "none"
    raise CommandError(f"there is no model '{name}' in {repository}; there are: {known}")


def add_model_name(parser: Parser, text: str) -> None:
    """Add the name of a model, which may also be given with -m."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("-m", "--model", metavar="MODEL", help="The same as MODEL.")


def given_name(given: Namespace) -> str:
    """Return the name from MODEL or -m. Raises UsageError."""
    if (given.name is None) == (given.model is None):
        raise UsageError("give the name of one model")
    name: str = given.model if given.name is None else given.name
    return name


def table_lines(found: Sequence[FoundModel]) -> list[str]:
    """Return a table with a row for each model."""
    rows = [("NAME", "FAMILY", "SIZE", "TYPE", "AGE", "SERVED", "SOURCE")]
    for one in found:
        served = "yes" if one.served else "no"
        source = one.source.replace(f"{Path.home()}/", "~/", 1)
        rows.append((one.name, one.family, one.size, one.type, one.age, served, source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:<{width}}}" for width in widths)
    return [line.format(*row).rstrip() for row in rows]


def age_text(seconds: float) -> str:
    for length, name in _UNITS:
        count = int(seconds // length)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''}"
    return "under a minute"
