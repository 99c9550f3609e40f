"""The models of a repository as users see them: one name, and the models that it consists of.

`slipstream import` writes five models for one name. `list`, `remove` and further imports treat them
as one.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.models import Repository, RepositoryModel, inspect_repository
from slipstream.repository.roles import Role
from slipstream.repository.templates import escape_quotes
from slipstream.repository.used_repositories import used_repositories
from slipstream.weights.cache.engines import CachedEngine, former_engines, remove_engine
from slipstream.weights.cache.locks import is_held
from slipstream.weights.whole_file import write_whole

# how a new engine reaches a running server: its tokenizer is read with it
_ENGINE_LAST = {Role.PREPROCESSING: 0, Role.POSTPROCESSING: 0, Role.ENGINE: 1}


@dataclass(frozen=True)
class UserModel:
    name: str
    folder: Path
    parts: tuple[str, ...]  # names of the models that it consists of, in an order to remove them in
    engine: Path | None = None  # engine folder that its files name, which may be missing

    @property
    def served(self) -> bool:
        """Return whether a running server has loaded it."""
        return is_held(self.folder / CONFIG_NAME)


def list_models(repository: Path) -> dict[str, UserModel]:
    """Return the models of a repository by the names that users call them by."""
    read = _read(repository)
    if read is None:
        return {}
    found: dict[str, UserModel] = {}
    covered: set[str] = set()
    # a BLS model first, since an ensemble over the same engine belongs to it
    for name in sorted(read.models, key=lambda name: (_rank(read, read.models[name]), name)):
        if name in covered:
            continue
        parts = _parts(read, name)
        found[name] = UserModel(name, read.models[name].folder, parts, _engine(read, parts))
        covered.update(parts)
    return dict(sorted(found.items()))


def _read(repository: Path) -> Repository | None:
    if not any(repository.glob(f"*/{CONFIG_NAME}")):
        return None
    return inspect_repository(repository)[0]


def _rank(read: Repository, model: RepositoryModel) -> int:
    if model.name in read.pipelines:
        return 0 if model.role is Role.BLS else 1
    return 2 if model.role is Role.ENSEMBLE else 3


def _parts(read: Repository, name: str) -> tuple[str, ...]:
    """Return a model, the ensembles over its engine, and the models that they are made of."""
    parts = [name]
    pipeline = read.pipelines.get(name)
    if pipeline is not None:
        ensembles = [other for other in read.pipelines.values() if other.ensemble]
        parts += [other.name for other in ensembles if other.engine == pipeline.engine]
    for part in list(parts):
        parts += [step.model_name for step in read.models[part].config.ensemble_steps]
    if pipeline is not None:
        parts.append(pipeline.engine)
    return tuple(dict.fromkeys(part for part in parts if part in read.models))


def _engine(read: Repository, parts: tuple[str, ...]) -> Path | None:
    for part in parts:
        model = read.models[part]
        if model.role is Role.ENGINE:
            given = model.parameters.get("gpt_model_path") or model.parameters.get("engine_dir")
            if given:
                return Path(given)
    return None


def point_to_engine(model: UserModel, engine: Path) -> None:
    """Make a model use another engine. Changes in its files are kept."""
    assert model.engine is not None, "a model without an engine cannot get another one"
    repository = model.folder.parent
    read = _read(repository)
    assert read is not None, f"{repository} has models"
    former = f'"{escape_quotes(str(model.engine))}"'
    for part in sorted(model.parts, key=lambda name: _ENGINE_LAST.get(read.models[name].role, 0)):
        file = repository / part / CONFIG_NAME
        text = file.read_text(encoding="utf-8")
        if former in text:
            changed = text.replace(former, f'"{escape_quotes(str(engine))}"')
            write_whole(file, changed, file.stat().st_mode & 0o777)


def set_engine_parameter(model: UserModel, key: str, value: str) -> bool:
    """Set a parameter of a model's engine model. Returns whether that changes its file."""
    repository = model.folder.parent
    read = _read(repository)
    assert read is not None, f"{repository} has models"
    engine = next(part for part in model.parts if read.models[part].role is Role.ENGINE)
    file = repository / engine / CONFIG_NAME
    text = file.read_text(encoding="utf-8")
    escaped = escape_quotes(value)
    line = f'parameters {{ key: "{key}" value {{ string_value: "{escaped}" }} }}\n'
    former = re.compile(rf'^parameters {{ key: "{re.escape(key)}" value .*\n', re.MULTILINE)
    changed = former.sub("", text) + line
    if changed == text:
        return False
    write_whole(file, changed, file.stat().st_mode & 0o777)
    return True


def remove_model(repository: Path, model: UserModel) -> list[Path]:
    """Remove a model and the parts that no other model uses. Returns the removed folders."""
    others = list_models(repository)
    needed = {part for name, other in others.items() if name != model.name for part in other.parts}
    removed = []
    for part in model.parts:
        if part in needed and part != model.name:
            continue
        folder = repository / part
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        removed.append(folder)
    return removed


def users_of(engine: Path) -> list[Path]:
    """Return the configurations that name an engine, in all known repositories.

    Files that cannot be parsed count, too: the name of an engine's folder is unique.
    """
    found = []
    for repository in used_repositories():
        for file in sorted(repository.glob(f"*/{CONFIG_NAME}")):
            if engine.name in file.read_text(encoding="utf-8", errors="replace"):
                found.append(file)
    return found


def is_needed(engine: CachedEngine) -> bool:
    """Return whether a running process or a known repository uses an engine."""
    return engine.in_use or bool(users_of(engine.path))


def remove_former_engines(engine: Path) -> int:
    """Remove the engines that this one replaces and nothing uses. Returns the bytes they took."""
    former = [other for other in former_engines(engine) if not is_needed(other)]
    return sum(remove_engine(other.path) for other in former)
